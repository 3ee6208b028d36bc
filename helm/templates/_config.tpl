{{/* The settings files: what the chart decides over what the values say. Keys are those of the binary. */}}

{{/* A dict as a section of TOML. Helm's own toToml writes whole numbers as 64.0. */}}
{{- define "lockstep.toml" -}}
[{{ .section }}]
{{- range $key, $value := .config }}
{{ $key }} = {{ toJson $value }}
{{- end }}
{{- end -}}

{{/* Settings as an annotation of a pod, and the volume that has them as a file. */}}
{{- define "lockstep.settingsAnnotation" -}}
lockstep.dev/settings: | {{- . | nindent 2 }}
{{- end -}}
{{- define "lockstep.settingsVolume" -}}
- {name: config, downwardAPI: {items: [{path: {{ . }}, fieldRef: {fieldPath: "metadata.annotations['lockstep.dev/settings']"}}]}}
{{- end -}}

{{/* What servers listen on: every address of their pod. */}}
{{- define "lockstep.anyAddress" -}}
{{ ternary "[::]" "0.0.0.0" (eq .Values.ipFamily "IPv6") }}
{{- end -}}

{{/* Pools with what they inherit, as JSON: name → pool. */}}
{{- define "lockstep.pools" -}}
{{- $pools := dict -}}
{{- range $name, $own := default (dict "worker" (dict)) .Values.pools -}}
{{- $_ := set $pools $name (mustMergeOverwrite (deepCopy $.Values.worker) (deepCopy (default dict $own))) -}}
{{- end -}}
{{- toJson $pools -}}
{{- end -}}

{{/*
Where the workers find the model. What is pulled lies in a folder of its own for each URI and checksum: another model of the
same file name is another file, also on a volume that workers of the release before still read.
*/}}
{{- define "lockstep.modelPath" -}}
{{- $model := .Values.model -}}
{{- if $model.stream -}}
{{ $model.uri }}
{{- else if $model.uri -}}
{{- $last := $model.uri | splitList "?" | first | splitList "/" | last -}}
/models/{{ default (sha256sum $model.uri) (lower $model.sha256) | trunc 16 }}/{{ default ($last | splitList "@" | first) $model.path }}
{{- else if $model.path -}}
/models/{{ $model.path }}
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
{{- $_ := set $config "grpc_listen" (printf "%s:7070" (include "lockstep.anyAddress" .)) -}}
{{- $_ := set $config "http_listen" (printf "%s:7080" (include "lockstep.anyAddress" .)) -}}
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

{{/* Workers that the pools have at least, and at most. */}}
{{- define "lockstep.minWorkers" -}}
{{- $sum := 0 -}}
{{- range $name, $pool := include "lockstep.pools" . | fromJson -}}
{{- $sum = add $sum (int (ternary $pool.autoscaling.minReplicas $pool.replicas $pool.autoscaling.enabled)) -}}
{{- end -}}
{{- $sum -}}
{{- end -}}
{{- define "lockstep.maxWorkers" -}}
{{- $sum := 0 -}}
{{- range $name, $pool := include "lockstep.pools" . | fromJson -}}
{{- $sum = add $sum (int (ternary $pool.autoscaling.maxReplicas $pool.replicas $pool.autoscaling.enabled)) -}}
{{- end -}}
{{- $sum -}}
{{- end -}}

{{/* Ranks that a worker of a pool runs: as many as its settings name, else its GPUs. */}}
{{- define "lockstep.devices" -}}
{{- $device := default "auto" .config.device -}}
{{- if hasPrefix "cuda:" $device -}}
{{- splitList "," $device | len -}}
{{- else if and (int .gpus) (ne $device "cpu") -}}
{{- int .gpus -}}
{{- else -}}
{{- int (default 1 .config.num_devices) -}}
{{- end -}}
{{- end -}}

{{/* Replicas of what is scaled by another: those that are there, since a field that vanishes from a manifest becomes 1. */}}
{{- define "lockstep.replicas" -}}
{{- if not .settings.autoscaling.enabled -}}
replicas: {{ .settings.replicas }}
{{- else -}}
{{- with lookup "apps/v1" .kind .root.Release.Namespace .name -}}
replicas: {{ .spec.replicas }}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Section [worker] of a pool, as JSON. */}}
{{- define "lockstep.workerConfig" -}}
{{- $config := include "lockstep.sharedConfig" .root | fromJson -}}
{{- $_ := set $config "listen" (printf "%s:7071" (include "lockstep.anyAddress" .root)) -}}
{{- $_ := set $config "http_listen" (printf "%s:7072" (include "lockstep.anyAddress" .root)) -}}
{{- $_ := set $config "rank_listen" (printf "%s:7073" (include "lockstep.anyAddress" .root)) -}}
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
