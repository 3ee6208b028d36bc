{{/*
Values that no schema can see to be wrong together: each is refused with the names of both.
*/}}

{{- define "lockstep.validate" -}}
{{- include "lockstep.validateNames" . -}}
{{- include "lockstep.validateModel" . -}}
{{- include "lockstep.validateEtcd" . -}}
{{- include "lockstep.validateTls" . -}}
{{- include "lockstep.validatePools" . -}}
{{- include "lockstep.validateCoordinator" . -}}
{{- include "lockstep.validateSurroundings" . -}}
{{- end -}}

{{- define "lockstep.validateNames" -}}
{{- $name := include "lockstep.fullname" . -}}
{{- if not (regexMatch "^[a-z]" $name) -}}
{{- fail (printf "fullnameOverride: is needed, since services' names begin with a letter and that of release %q does not" .Release.Name) -}}
{{- end -}}
{{- range $pool, $_ := include "lockstep.pools" . | fromJson -}}
{{- if gt (len (printf "%s-%s" $name $pool)) 52 -}}
{{- fail (printf "pools.%s and fullnameOverride: %s-%s has %d characters, 52 are the most that a StatefulSet's pods can be named by" $pool $name $pool (len (printf "%s-%s" $name $pool))) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "lockstep.validateModel" -}}
{{- $model := .Values.model -}}
{{- $cache := $model.cache -}}
{{- if not (or $model.uri $model.path) -}}
{{- fail "model.uri or model.path: one of them must name the model" -}}
{{- end -}}
{{- if and $model.stream (not (regexMatch "^(https?|s3|gs|az)://" $model.uri)) -}}
{{- fail (printf "model.stream=true and model.uri=%q: that is none that can be read in place" $model.uri) -}}
{{- end -}}
{{- if and $model.stream (or $model.sha256 $model.path) -}}
{{- fail (printf "model.stream=true and model.%s: nothing is written, so there is no file to check or to name" (ternary "sha256" "path" (ne $model.sha256 ""))) -}}
{{- end -}}
{{- if and $model.sha256 (not $model.uri) -}}
{{- fail "model.sha256 and model.path without model.uri: only what is pulled is checked" -}}
{{- end -}}
{{- if and $cache.readOnly (or (has $cache.type (list "emptyDir" "volumeClaimTemplate")) (and (eq $cache.type "persistentVolumeClaim") (not $cache.existingClaim))) -}}
{{- fail (printf "model.cache.readOnly=true and model.cache.type=%s: nothing puts the file there; existingClaim or hostPath may hold it" $cache.type) -}}
{{- end -}}
{{- if not $model.uri -}}
{{- if has $cache.type (list "emptyDir" "volumeClaimTemplate") -}}
{{- fail (printf "model.path without model.uri and model.cache.type=%s: nothing puts the file there; persistentVolumeClaim with existingClaim, or hostPath, may hold it" $cache.type) -}}
{{- end -}}
{{- if and (eq $cache.type "persistentVolumeClaim") (not $cache.existingClaim) -}}
{{- fail "model.path without model.uri and model.cache.type=persistentVolumeClaim: model.cache.existingClaim must name the claim that holds the file" -}}
{{- end -}}
{{- end -}}
{{- range $key, $type := dict "existingClaim" "persistentVolumeClaim" "sizeLimit" "emptyDir" -}}
{{- if and (get $cache $key) (ne $cache.type $type) -}}
{{- fail (printf "model.cache.%s=%s and model.cache.type=%s: only %s has one" $key (get $cache $key) $cache.type $type) -}}
{{- end -}}
{{- end -}}
{{- if regexMatch "^https?://[^/]*@|[?&]([Xx]-(Amz|Goog)-Signature|Signature|sig)=" $model.uri -}}
{{- fail "model.uri: holds a password or a signature, which all who see the pods could read: model.environmentSecrets or serviceAccount.annotations give access" -}}
{{- end -}}
{{- $isMade := or (eq $cache.type "volumeClaimTemplate") (and (eq $cache.type "persistentVolumeClaim") (not $cache.existingClaim)) -}}
{{- if and $cache.existingClaim $model.uri (not $cache.readOnly) (eq (join "" $cache.accessModes) "ReadOnlyMany") -}}
{{- fail (printf "model.cache.existingClaim=%s and model.cache.accessModes=[ReadOnlyMany]: a claim that can only be read needs model.cache.readOnly=true" $cache.existingClaim) -}}
{{- end -}}
{{- if and $isMade (not $model.stream) (eq (join "" $cache.accessModes) "ReadOnlyMany") -}}
{{- fail "model.cache.accessModes=[ReadOnlyMany] and model.uri: nobody could write what is pulled" -}}
{{- end -}}
{{- if and $isMade (not $model.stream) (eq $cache.type "persistentVolumeClaim") (not (has "ReadWriteMany" $cache.accessModes)) (gt (int (include "lockstep.maxWorkers" .)) 1) -}}
{{- fail (printf "model.cache.accessModes=%v and %s workers, who share the claim: ReadWriteMany is needed, or model.cache.type volumeClaimTemplate" $cache.accessModes (include "lockstep.maxWorkers" .)) -}}
{{- end -}}
{{- end -}}

{{- define "lockstep.validateEtcd" -}}
{{- $etcd := .Values.etcd -}}
{{- if and (eq $etcd.mode "none") (or (gt (int .Values.coordinator.replicas) 1) .Values.coordinator.autoscaling.enabled) -}}
{{- fail "etcd.mode=none and coordinator.replicas or coordinator.autoscaling: several coordinators meet in etcd: bundled or external is needed" -}}
{{- end -}}
{{- if and (ne $etcd.mode "external") $etcd.endpoints -}}
{{- fail (printf "etcd.endpoints and etcd.mode=%s: endpoints are those of mode external" $etcd.mode) -}}
{{- end -}}
{{- if and (ne $etcd.mode "external") (or $etcd.user.name $etcd.user.secretName) -}}
{{- fail (printf "etcd.user and etcd.mode=%s: only an external etcd knows users" $etcd.mode) -}}
{{- end -}}
{{- if and (eq $etcd.mode "none") (or $etcd.tls.secretName $etcd.prefix) -}}
{{- fail (printf "etcd.%s and etcd.mode=none: there is no etcd" (ternary "tls.secretName" "prefix" (ne $etcd.tls.secretName ""))) -}}
{{- end -}}
{{- if and (eq $etcd.mode "external") (not $etcd.endpoints) -}}
{{- fail "etcd.endpoints and etcd.mode=external: endpoints are needed" -}}
{{- end -}}
{{- $clear := list -}}
{{- range $etcd.endpoints }}{{ if hasPrefix "http://" . }}{{ $clear = append $clear . }}{{ end }}{{ end -}}
{{- if and $clear (ne (len $clear) (len $etcd.endpoints)) -}}
{{- fail (printf "etcd.endpoints: %s is clear text and others are https://: all or none" (first $clear)) -}}
{{- end -}}
{{- if and $clear $etcd.tls.secretName -}}
{{- fail (printf "etcd.endpoints and etcd.tls.secretName=%s: %s is clear text" $etcd.tls.secretName (first $clear)) -}}
{{- end -}}
{{- if and (not .Values.insecure) (or $clear (and (eq $etcd.mode "bundled") (not (include "lockstep.etcdSecret" .)))) -}}
{{- fail "etcd.tls.secretName: etcd would be spoken to in clear text, which needs insecure=true" -}}
{{- end -}}
{{- if ne (empty $etcd.user.name) (empty $etcd.user.secretName) -}}
{{- fail "etcd.user.name and etcd.user.secretName: a user and the secret of its password are given together" -}}
{{- end -}}
{{- end -}}

{{- define "lockstep.validateTls" -}}
{{- if and (not .Values.insecure) (or (eq .Values.tls.cluster.mode "none") (eq .Values.tls.clients.mode "none")) -}}
{{- fail "tls.cluster.mode and tls.clients.mode: both are needed, or insecure=true for a network that you trust" -}}
{{- end -}}
{{- with .Values.tls.clients -}}
{{- if and (eq .mode "none") (or .dnsNames .serverName .checkSecretName) -}}
{{- fail (printf "tls.clients.%s and tls.clients.mode=none: clients are spoken to in clear text" (ternary "dnsNames" (ternary "serverName" "checkSecretName" (ne .serverName "")) (gt (len .dnsNames) 0))) -}}
{{- end -}}
{{- if and .clientCa.secretName (or (eq .mode "none") (not .checkSecretName)) -}}
{{- fail "tls.clients.clientCa: needs certificates (tls.clients.mode) and tls.clients.checkSecretName" -}}
{{- end -}}
{{- if and (eq .mode "certManager") (not .issuerRef.name) -}}
{{- fail "tls.clients.issuerRef.name: is needed with tls.clients.mode certManager" -}}
{{- end -}}
{{- if and (eq .mode "certManager") (not .clusterNames) (not .dnsNames) -}}
{{- fail "tls.clients.clusterNames=false and tls.clients.dnsNames=[]: the certificate would be for nobody" -}}
{{- end -}}
{{- if and (eq .ca.from "system") .ca.secretName -}}
{{- fail (printf "tls.clients.ca.from=system and tls.clients.ca.secretName=%s: the authority is every system's or that of the secret" .ca.secretName) -}}
{{- end -}}
{{- end -}}
{{- range $name, $tls := pick .Values.tls "cluster" "clients" -}}
{{- if and (eq $tls.mode "secret") (not $tls.secretName) -}}
{{- fail (printf "tls.%s.secretName: is needed with tls.%s.mode secret" $name $name) -}}
{{- end -}}
{{- if eq $tls.mode "certManager" -}}
{{- $duration := trimSuffix "h" $tls.duration | int -}}
{{- $renewBefore := trimSuffix "h" $tls.renewBefore | int -}}
{{- if ge $renewBefore $duration -}}
{{- fail (printf "tls.%s.renewBefore=%s and tls.%s.duration=%s: a certificate would be renewed before it is made" $name $tls.renewBefore $name $tls.duration) -}}
{{- end -}}
{{- if and $.Values.monitoring.rules.enabled (le $renewBefore 72) -}}
{{- fail (printf "tls.%s.renewBefore=%s and monitoring.rules.enabled=true: the alert LockstepCertificateExpires is about certificates that have less than 72h" $name $tls.renewBefore) -}}
{{- end -}}
{{- end -}}
{{- if and (eq $tls.mode "none") $tls.secretName -}}
{{- fail (printf "tls.%s.secretName=%s and tls.%s.mode=none: the secret would not be used" $name $tls.secretName $name) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "lockstep.validatePools" -}}
{{- $devices := 0 -}}
{{- $atLeast := 0 -}}
{{- $scaled := "" -}}
{{- range $name, $pool := include "lockstep.pools" . | fromJson -}}
{{- $where := ternary (printf "pools.%s" $name) "worker" (hasKey $.Values.pools $name) -}}
{{- $device := default "auto" $pool.config.device -}}
{{- $names := splitList "," $device -}}
{{- if ne (len $names) (len (uniq $names)) -}}
{{- fail (printf "%s.config.device=%s: names a device twice" $where $device) -}}
{{- end -}}
{{- if and (not (int $pool.gpus)) (hasPrefix "cuda" $device) -}}
{{- fail (printf "%s.config.device=%s and %s.gpus=0: the pod would have no GPU" $where $device $where) -}}
{{- end -}}
{{- if and (int $pool.gpus) (eq $device "cpu") -}}
{{- fail (printf "%s.config.device=cpu and %s.gpus=%d: the GPUs would be idle" $where $where (int $pool.gpus)) -}}
{{- end -}}
{{- if and (int $pool.gpus) (ne (int (include "lockstep.devices" $pool)) (int $pool.gpus)) -}}
{{- fail (printf "%s.config.device=%s and %s.gpus=%d: it names %s of them" $where $device $where (int $pool.gpus) (include "lockstep.devices" $pool)) -}}
{{- end -}}
{{- range $names -}}
{{- if and (hasPrefix "cuda:" .) (ge (trimPrefix "cuda:" . | int) (int $pool.gpus)) -}}
{{- fail (printf "%s.config.device=%s and %s.gpus=%d: the first GPU of a pod is cuda:0" $where $device $where (int $pool.gpus)) -}}
{{- end -}}
{{- end -}}
{{- if and (int $pool.gpus) (eq (default "auto" $pool.config.dtype) "f32") -}}
{{- fail (printf "%s.config.dtype=f32 and %s.gpus=%d: CUDA holds keys and values in f16 or bf16" $where $where (int $pool.gpus)) -}}
{{- end -}}
{{- if and (int $pool.gpus) $pool.config.num_devices -}}
{{- fail (printf "%s.config.num_devices and %s.gpus=%d: devices are made of the processor alone" $where $where (int $pool.gpus)) -}}
{{- end -}}
{{- if and $pool.hostNetwork (eq $pool.placement "pack") -}}
{{- fail (printf "%s.hostNetwork=true and %s.placement=pack: two workers of a node would want the same ports" $where $where) -}}
{{- end -}}
{{- if and $pool.hostNetwork $.Values.networkPolicy.enabled (not $.Values.networkPolicy.nodes) -}}
{{- fail (printf "%s.hostNetwork=true and networkPolicy.enabled=true: such pods have their nodes' addresses, which no selector of pods matches: networkPolicy.nodes must name them" $where) -}}
{{- end -}}
{{- if and (eq $pool.update.strategy "OnDelete") (int $pool.update.partition) -}}
{{- fail (printf "%s.update.strategy=OnDelete and %s.update.partition=%d: pods are replaced when somebody deletes them" $where $where (int $pool.update.partition)) -}}
{{- end -}}
{{- include "lockstep.validateResources" (dict "where" $where "resources" $pool.resources) -}}
{{- include "lockstep.validateVolumes" (dict "where" $where "pool" $pool) -}}
{{- include "lockstep.validateScaling" (dict "root" $ "where" $where "scaling" $pool.autoscaling) -}}
{{- $most := int (ternary $pool.autoscaling.maxReplicas $pool.replicas $pool.autoscaling.enabled) -}}
{{- $ofWorker := int (include "lockstep.devices" $pool) -}}
{{- $devices = add $devices (mul $most $ofWorker) -}}
{{- $atLeast = add $atLeast (mul (ternary $pool.autoscaling.minReplicas $pool.replicas $pool.autoscaling.enabled | int) $ofWorker) -}}
{{- if $pool.autoscaling.enabled }}{{ $scaled = $where }}{{ end -}}
{{- end -}}
{{- $policy := default "auto" .Values.coordinator.config.policy -}}
{{- $ranks := 1 -}}
{{- range regexFindAll "(tensor|pipeline)=[0-9]+" $policy -1 }}{{ $ranks = mul $ranks (splitList "=" . | last | int) }}{{ end -}}
{{- range regexFindAll "hybrid=[0-9]+x[0-9]+" $policy -1 -}}
{{- range splitList "=" . | last | splitList "x" }}{{ $ranks = mul $ranks (int .) }}{{ end -}}
{{- end -}}
{{- /* Without any worker the release is at rest. */ -}}
{{- if and (int $devices) (gt (int $ranks) (int $devices)) -}}
{{- fail (printf "coordinator.config.policy=%s and the pools: a replica has %d ranks, all workers together have %d devices" $policy (int $ranks) (int $devices)) -}}
{{- end -}}
{{- $replicas := regexFind "replicas=[0-9]+" $policy | trimPrefix "replicas=" | default "1" | int -}}
{{- $wanted := mul $ranks $replicas | int -}}
{{- if and (int $devices) (gt $wanted (int $devices)) -}}
{{- fail (printf "coordinator.config.policy=%s and the pools: %d replicas of %d ranks, all workers together have %d devices" $policy $replicas (int $ranks) (int $devices)) -}}
{{- end -}}
{{- if and $scaled (regexMatch "^(tensor|pipeline|hybrid)=.*,replicas=" $policy) (le $wanted (int $atLeast)) -}}
{{- fail (printf "coordinator.config.policy=%s and %s.autoscaling: its %d devices are there with the fewest workers, more would be idle" $policy $scaled $wanted) -}}
{{- end -}}
{{- $least := int (default 1 .Values.coordinator.config.min_workers) -}}
{{- if and (int $devices) (gt $least (int (include "lockstep.maxWorkers" .))) -}}
{{- fail (printf "coordinator.config.min_workers=%d and the pools, which have %s workers at most: nothing would ever be planned" $least (include "lockstep.maxWorkers" .)) -}}
{{- end -}}
{{- end -}}

{{- define "lockstep.validateCoordinator" -}}
{{- $coordinator := .Values.coordinator -}}
{{- include "lockstep.validateResources" (dict "where" "coordinator" "resources" $coordinator.resources) -}}
{{- include "lockstep.validateResources" (dict "where" "etcd.bundled" "resources" .Values.etcd.bundled.resources) -}}
{{- include "lockstep.validateScaling" (dict "root" . "where" "coordinator" "scaling" $coordinator.autoscaling) -}}
{{- if eq (int $coordinator.service.grpcPort) (int $coordinator.service.httpPort) -}}
{{- fail (printf "coordinator.service.grpcPort and coordinator.service.httpPort: both are %d" (int $coordinator.service.grpcPort)) -}}
{{- end -}}
{{- end -}}

{{- define "lockstep.validateScaling" -}}
{{- if .scaling.enabled -}}
{{- if gt (int .scaling.minReplicas) (int .scaling.maxReplicas) -}}
{{- fail (printf "%s.autoscaling.minReplicas=%d and %s.autoscaling.maxReplicas=%d: the least is more than the most" .where (int .scaling.minReplicas) .where (int .scaling.maxReplicas)) -}}
{{- end -}}
{{- if and (eq .scaling.kind "keda") (not .root.Values.monitoring.prometheusUrl) -}}
{{- fail (printf "monitoring.prometheusUrl: is needed with %s.autoscaling.kind keda" .where) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "lockstep.validateVolumes" -}}
{{- $named := list -}}
{{- range .pool.extraVolumes -}}
{{- if has .name (concat $named (list "config" "models" "shm" "tmp" "kernels" "cluster-tls" "etcd-tls" "etcd-user" "otlp-tls")) -}}
{{- fail (printf "%s.extraVolumes: a volume %s is there already" $.where .name) -}}
{{- end -}}
{{- $named = append $named .name -}}
{{- end -}}
{{- range .pool.extraVolumeMounts -}}
{{- if not (has .name $named) -}}
{{- fail (printf "%s.extraVolumeMounts and %s.extraVolumes: there is no volume %s" $.where $.where .name) -}}
{{- end -}}
{{- if has (clean .mountPath) (list "/" "/models" "/tmp" "/dev/shm" "/var/cache/lockstep" "/etc/lockstep/config") -}}
{{- fail (printf "%s.extraVolumeMounts: %s is mounted already" $.where .mountPath) -}}
{{- end -}}
{{- end -}}
{{- if and (not .pool.hostIPC) .pool.resources.limits.memory (gt (include "lockstep.quantity" .pool.sharedMemory | float64) (include "lockstep.quantity" .pool.resources.limits.memory | float64)) -}}
{{- fail (printf "%s.sharedMemory=%s and %s.resources.limits.memory=%v: shared memory counts as the pod's" .where .pool.sharedMemory .where .pool.resources.limits.memory) -}}
{{- end -}}
{{- end -}}

{{- define "lockstep.validateResources" -}}
{{- range $name, $wanted := .resources.requests -}}
{{- $most := get $.resources.limits $name -}}
{{- if and $most (gt (include "lockstep.quantity" $wanted | float64) (include "lockstep.quantity" $most | float64)) -}}
{{- fail (printf "%s.resources.requests.%s=%v and %s.resources.limits.%s=%v: more is asked for than is allowed" $.where $name $wanted $.where $name $most) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* A quantity of Kubernetes as a number. */}}
{{- define "lockstep.quantity" -}}
{{- $text := toString . -}}
{{- $suffix := regexFind "[A-Za-z]*$" $text -}}
{{- $factor := get (dict "m" 0.001 "k" 1e3 "M" 1e6 "G" 1e9 "T" 1e12 "Ki" 1024 "Mi" 1048576 "Gi" 1073741824 "Ti" 1099511627776) $suffix -}}
{{- mulf (trimSuffix $suffix $text | float64) (default 1 $factor | float64) -}}
{{- end -}}

{{- define "lockstep.validateSurroundings" -}}
{{- $telemetry := .Values.telemetry -}}
{{- if and (not $telemetry.otlpEndpoint) (or $telemetry.otlpTls.secretName $telemetry.otlpHeaders.secretName) -}}
{{- fail (printf "telemetry.%s.secretName and telemetry.otlpEndpoint=\"\": nobody collects traces" (ternary "otlpTls" "otlpHeaders" (ne $telemetry.otlpTls.secretName ""))) -}}
{{- end -}}
{{- if and .Values.tenants.testKey.secretName (not .Values.tenants.secretName) -}}
{{- fail "tenants.testKey.secretName and tenants.secretName=\"\": without tenants there are no keys" -}}
{{- end -}}
{{- if and .Values.ingress.enabled (not .Values.ingress.http.host) (not .Values.ingress.grpc.host) -}}
{{- fail "ingress.enabled=true and ingress.http.host and ingress.grpc.host, which are empty: there would be no Ingress" -}}
{{- end -}}
{{- with .Values.gateway -}}
{{- if and .enabled (not .parentRefs) -}}
{{- fail "gateway.enabled=true and gateway.parentRefs=[]: routes belong to a gateway" -}}
{{- end -}}
{{- if and .enabled (not .httpHostnames) (not .grpcHostnames) -}}
{{- fail "gateway.enabled=true and gateway.httpHostnames and gateway.grpcHostnames, which are empty: there would be no route" -}}
{{- end -}}
{{- end -}}
{{- with .Values.networkPolicy -}}
{{- range $key := list "clientsFrom" "metricsFrom" "nodes" -}}
{{- if and (not $.Values.networkPolicy.enabled) (get $.Values.networkPolicy $key) -}}
{{- fail (printf "networkPolicy.%s and networkPolicy.enabled=false: everybody would be let in" $key) -}}
{{- end -}}
{{- end -}}
{{- if and .enabled .clientsFrom $.Values.monitoring.serviceMonitor.enabled (not .metricsFrom) -}}
{{- fail "networkPolicy.clientsFrom and networkPolicy.metricsFrom=[] and monitoring.serviceMonitor.enabled=true: metricsFrom must name Prometheus, which else could not reach the coordinators" -}}
{{- end -}}
{{- end -}}
{{- end -}}
