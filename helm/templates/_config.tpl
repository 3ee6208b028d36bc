{{/* The settings files: what the chart decides over what the values say. Keys are those of the binary. */}}

{{/* A dict as a section of TOML. Helm's own toToml writes whole numbers as 64.0. */}}
{{- define "lockstep.toml" -}}
[{{ .section }}]
{{- range $key, $value := .config }}
{{ $key }} = {{ toJson $value }}
{{- end }}
{{- end -}}

{{/* Pools with what they inherit, as JSON: name → pool. */}}
{{- define "lockstep.pools" -}}
{{- $pools := dict -}}
{{- range $name, $own := default (dict "worker" (dict)) .Values.pools -}}
{{- $_ := set $pools $name (mustMergeOverwrite (deepCopy $.Values.worker) (deepCopy (default dict $own))) -}}
{{- end -}}
{{- toJson $pools -}}
{{- end -}}

{{/* Where the workers find the model. */}}
{{- define "lockstep.modelPath" -}}
{{- if .Values.model.stream -}}
{{ .Values.model.uri }}
{{- else if or .Values.model.path .Values.model.uri -}}
{{- $last := .Values.model.uri | splitList "?" | first | splitList "/" | last -}}
/models/{{ default ($last | splitList "@" | first) .Values.model.path }}
{{- end -}}
{{- end -}}

{{/* Whether the chart's own etcd speaks TLS; empty if not. */}}
{{- define "lockstep.etcdSecret" -}}
{{- if .Values.etcd.tls.secretName -}}
{{- .Values.etcd.tls.secretName -}}
{{- else if and (eq .Values.etcd.mode "bundled") (eq .Values.tls.cluster.mode "certManager") -}}
{{- printf "%s-etcd-tls" (include "lockstep.fullname" .) -}}
{{- end -}}
{{- end -}}

{{/* Client URLs of etcd as JSON; empty without etcd. */}}
{{- define "lockstep.etcdEndpoints" -}}
{{- $endpoints := list -}}
{{- if eq .Values.etcd.mode "external" -}}
{{- $endpoints = .Values.etcd.endpoints -}}
{{- else if eq .Values.etcd.mode "bundled" -}}
{{- $name := printf "%s-etcd" (include "lockstep.fullname" .) -}}
{{- range $index := until (int .Values.etcd.bundled.replicas) -}}
{{- $endpoints = append $endpoints (printf "%s://%s-%d.%s.%s.svc:2379" (include "lockstep.etcdScheme" $) $name $index $name $.Release.Namespace) -}}
{{- end -}}
{{- end -}}
{{- toJson $endpoints -}}
{{- end -}}

{{- define "lockstep.etcdScheme" -}}
{{- ternary "https" "http" (ne (include "lockstep.etcdSecret" .) "") -}}
{{- end -}}

{{/* What members of the cluster have in common, as JSON. */}}
{{- define "lockstep.sharedConfig" -}}
{{- $config := dict -}}
{{- with include "lockstep.etcdEndpoints" . | fromJsonArray -}}
{{- $_ := set $config "etcd" . -}}
{{- $_ := set $config "etcd_prefix" (default (printf "/%s/%s" $.Release.Namespace (include "lockstep.fullname" $)) $.Values.etcd.prefix) -}}
{{- if include "lockstep.etcdSecret" $ -}}
{{- $_ := set $config "etcd_ca" "/etc/lockstep/etcd-tls/ca.crt" -}}
{{- if or (eq $.Values.etcd.mode "bundled") $.Values.etcd.tls.clientCertificate -}}
{{- $_ := set $config "etcd_cert" "/etc/lockstep/etcd-tls/tls.crt" -}}
{{- $_ := set $config "etcd_key" "/etc/lockstep/etcd-tls/tls.key" -}}
{{- end -}}
{{- end -}}
{{- if $.Values.etcd.user.name -}}
{{- $_ := set $config "etcd_username" $.Values.etcd.user.name -}}
{{- $_ := set $config "etcd_password_file" (printf "/etc/lockstep/etcd-user/%s" $.Values.etcd.user.key) -}}
{{- end -}}
{{- end -}}
{{- if ne .Values.tls.cluster.mode "none" -}}
{{- $_ := set $config "cluster_ca" "/etc/lockstep/cluster-tls/ca.crt" -}}
{{- $_ := set $config "cluster_cert" "/etc/lockstep/cluster-tls/tls.crt" -}}
{{- $_ := set $config "cluster_key" "/etc/lockstep/cluster-tls/tls.key" -}}
{{- end -}}
{{- if .Values.insecure -}}
{{- $_ := set $config "insecure" true -}}
{{- end -}}
{{- toJson $config -}}
{{- end -}}

{{/* Section [coordinator], as JSON. */}}
{{- define "lockstep.coordinatorConfig" -}}
{{- $config := include "lockstep.sharedConfig" . | fromJson -}}
{{- $_ := set $config "grpc_listen" "0.0.0.0:7070" -}}
{{- $_ := set $config "http_listen" "0.0.0.0:7080" -}}
{{- with include "lockstep.modelPath" . }}{{ $_ := set $config "model" . }}{{ end -}}
{{- if ne .Values.tls.clients.mode "none" -}}
{{- $_ := set $config "tls_cert" "/etc/lockstep/clients-tls/tls.crt" -}}
{{- $_ := set $config "tls_key" "/etc/lockstep/clients-tls/tls.key" -}}
{{- end -}}
{{- if .Values.tls.clients.clientCa.secretName -}}
{{- $_ := set $config "client_ca" (printf "/etc/lockstep/client-ca/%s" .Values.tls.clients.clientCa.key) -}}
{{- end -}}
{{- if .Values.tenants.secretName -}}
{{- $_ := set $config "tenants" (printf "/etc/lockstep/tenants/%s" .Values.tenants.key) -}}
{{- end -}}
{{- toJson (mustMergeOverwrite $config (deepCopy .Values.coordinator.config)) -}}
{{- end -}}

{{/* Workers that the pools have at least. */}}
{{- define "lockstep.minWorkers" -}}
{{- $sum := 0 -}}
{{- range $name, $pool := include "lockstep.pools" . | fromJson -}}
{{- $sum = add $sum (int (ternary $pool.autoscaling.minReplicas $pool.replicas $pool.autoscaling.enabled)) -}}
{{- end -}}
{{- $sum -}}
{{- end -}}

{{/* Section [worker] of a pool, as JSON. */}}
{{- define "lockstep.workerConfig" -}}
{{- $config := include "lockstep.sharedConfig" .root | fromJson -}}
{{- $_ := set $config "listen" "0.0.0.0:7071" -}}
{{- $_ := set $config "http_listen" "0.0.0.0:7072" -}}
{{- $_ := set $config "rank_listen" "0.0.0.0:7073" -}}
{{- if not (hasKey $config "etcd") -}}
{{- $_ := set $config "coordinator" (printf "%s-members.%s.svc:7070" (include "lockstep.fullname" .root) .root.Release.Namespace) -}}
{{- end -}}
{{- if not (int .pool.gpus) -}}
{{- $_ := set $config "device" "cpu" -}}
{{- else -}}
{{- $_ := set $config "kernel_cache" "/var/cache/lockstep" -}}
{{- end -}}
{{- toJson (mustMergeOverwrite $config (deepCopy .pool.config)) -}}
{{- end -}}

{{/* Seconds that a pod has to end in: the drain, and then traces and leases. */}}
{{- define "lockstep.graceSeconds" -}}
{{- add (ceil (default 30 (index . "drain_timeout_secs")) | int) 20 -}}
{{- end -}}

{{/* Refuses values that no schema can see to be wrong together. */}}
{{- define "lockstep.validate" -}}
{{- if not (include "lockstep.modelPath" .) -}}
{{- fail "model.uri or model.path: one of them must name the model" -}}
{{- end -}}
{{- if and .Values.model.stream (not (regexMatch "^(https?|s3|gs|az)://" .Values.model.uri)) -}}
{{- fail (printf "model.stream: model.uri %q is none that can be read in place" .Values.model.uri) -}}
{{- end -}}
{{- if and (not .Values.insecure) (or (eq .Values.tls.cluster.mode "none") (eq .Values.tls.clients.mode "none")) -}}
{{- fail "tls.cluster.mode and tls.clients.mode: both are needed, or insecure=true for a network that you trust" -}}
{{- end -}}
{{- if and (eq .Values.etcd.mode "none") (or (gt (int .Values.coordinator.replicas) 1) .Values.coordinator.autoscaling.enabled) -}}
{{- fail "etcd.mode: several coordinators meet in etcd: bundled or external is needed" -}}
{{- end -}}
{{- if and (eq .Values.etcd.mode "external") (not .Values.etcd.endpoints) -}}
{{- fail "etcd.endpoints: are needed with etcd.mode external" -}}
{{- end -}}
{{- if and (not .Values.insecure) (or (and (eq .Values.etcd.mode "bundled") (not (include "lockstep.etcdSecret" .))) (hasPrefix "http://" (first (append .Values.etcd.endpoints "")))) -}}
{{- fail "etcd.tls.secretName: etcd would be spoken to in clear text, which needs insecure=true" -}}
{{- end -}}
{{- if and .Values.etcd.user.name (not .Values.etcd.user.secretName) -}}
{{- fail "etcd.user.secretName: is needed for the user's password" -}}
{{- end -}}
{{- with .Values.tls.clients -}}
{{- if and .clientCa.secretName (or (eq .mode "none") (not .checkSecretName)) -}}
{{- fail "tls.clients.clientCa: needs certificates (tls.clients.mode) and tls.clients.checkSecretName" -}}
{{- end -}}
{{- end -}}
{{- if and (eq .Values.tls.clients.mode "certManager") (not .Values.tls.clients.issuerRef.name) -}}
{{- fail "tls.clients.issuerRef.name: is needed with tls.clients.mode certManager" -}}
{{- end -}}
{{- range $name, $tls := pick .Values.tls "cluster" "clients" -}}
{{- if and (eq $tls.mode "secret") (not $tls.secretName) -}}
{{- fail (printf "tls.%s.secretName: is needed with tls.%s.mode secret" $name $name) -}}
{{- end -}}
{{- end -}}
{{- $pools := include "lockstep.pools" . | fromJson -}}
{{- if and (eq .Values.model.cache.type "persistentVolumeClaim") (not .Values.model.cache.existingClaim) (not (has "ReadWriteMany" .Values.model.cache.accessModes)) (gt (int (include "lockstep.minWorkers" .)) 1) -}}
{{- fail "model.cache.accessModes: several workers share the claim: ReadWriteMany is needed, or type volumeClaimTemplate" -}}
{{- end -}}
{{- $scalers := list .Values.coordinator -}}
{{- range $pools }}{{ $scalers = append $scalers . }}{{ end -}}
{{- range $scalers -}}
{{- if and .autoscaling.enabled (eq .autoscaling.kind "keda") (not $.Values.monitoring.prometheusUrl) -}}
{{- fail "monitoring.prometheusUrl: is needed with autoscaling.kind keda" -}}
{{- end -}}
{{- end -}}
{{- end -}}
