{{/* Mounts, volumes and affinities of coordinators and workers. */}}

{{- define "lockstep.memberMounts" -}}
{{- if ne .Values.tls.cluster.mode "none" }}
- {name: cluster-tls, mountPath: /etc/lockstep/cluster-tls, readOnly: true}
{{- end }}
{{- if include "lockstep.etcdSecret" . }}
- {name: etcd-tls, mountPath: /etc/lockstep/etcd-tls, readOnly: true}
{{- end }}
{{- if .Values.etcd.user.name }}
- {name: etcd-user, mountPath: /etc/lockstep/etcd-user, readOnly: true}
{{- end }}
{{- if .Values.telemetry.otlpTls.secretName }}
- {name: otlp-tls, mountPath: /etc/lockstep/otlp-tls, readOnly: true}
{{- end }}
{{- end -}}

{{- define "lockstep.memberVolumes" -}}
{{- if ne .Values.tls.cluster.mode "none" }}
- {name: cluster-tls, secret: {secretName: {{ include "lockstep.clusterSecret" . }}}}
{{- end }}
{{- with include "lockstep.etcdSecret" . }}
- {name: etcd-tls, secret: {secretName: {{ . }}}}
{{- end }}
{{- if .Values.etcd.user.name }}
- {name: etcd-user, secret: {secretName: {{ .Values.etcd.user.secretName }}}}
{{- end }}
{{- with .Values.telemetry.otlpTls.secretName }}
- {name: otlp-tls, secret: {secretName: {{ . }}}}
{{- end }}
{{- end -}}

{{/* Requests and limits with devices beside them; numbers become text, which every reader of quantities takes. */}}
{{- define "lockstep.resources" -}}
{{- range $kind := list "requests" "limits" }}
{{ $kind }}:
{{- range $name, $value := merge (dict) (get $.resources $kind) (default dict $.devices) }}
  {{ $name }}: {{ $value | toString | quote }}
{{- end }}
{{- end }}
{{- end -}}

{{- define "lockstep.coordinatorAffinity" -}}
{{- $settings := .Values.coordinator -}}
{{- $term := dict "topologyKey" "kubernetes.io/hostname" "labelSelector" (dict "matchLabels" (merge (dict "app.kubernetes.io/component" "coordinator") (include "lockstep.selector" . | fromYaml))) -}}
{{- $affinity := dict -}}
{{- if eq $settings.antiAffinity "hard" -}}
{{- $affinity = dict "podAntiAffinity" (dict "requiredDuringSchedulingIgnoredDuringExecution" (list $term)) -}}
{{- else if eq $settings.antiAffinity "soft" -}}
{{- $affinity = dict "podAntiAffinity" (dict "preferredDuringSchedulingIgnoredDuringExecution" (list (dict "weight" 100 "podAffinityTerm" $term))) -}}
{{- end -}}
{{- toYaml (mustMergeOverwrite $affinity (deepCopy $settings.affinity)) -}}
{{- end -}}

{{/* Labels of a pool's pods. */}}
{{- define "lockstep.poolSelector" -}}
{{ include "lockstep.selector" .root }}
app.kubernetes.io/component: worker
lockstep.dev/pool: {{ .name }}
{{- end -}}

{{/* All workers of a packed pool share a node; what the pool says itself wins. */}}
{{- define "lockstep.poolAffinity" -}}
{{- $affinity := dict -}}
{{- if eq .pool.placement "pack" -}}
{{- $term := dict "topologyKey" "kubernetes.io/hostname" "labelSelector" (dict "matchLabels" (include "lockstep.poolSelector" . | fromYaml)) -}}
{{- $affinity = dict "podAffinity" (dict "requiredDuringSchedulingIgnoredDuringExecution" (list $term)) -}}
{{- end -}}
{{- with mustMergeOverwrite $affinity (deepCopy .pool.affinity) }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- define "lockstep.poolSpread" -}}
{{- $constraints := .pool.topologySpreadConstraints -}}
{{- if and (eq .pool.placement "spread") (not $constraints) -}}
{{- $constraints = list (dict "maxSkew" 1 "topologyKey" "kubernetes.io/hostname" "whenUnsatisfiable" "ScheduleAnyway" "labelSelector" (dict "matchLabels" (include "lockstep.poolSelector" . | fromYaml))) -}}
{{- end -}}
{{- with $constraints }}
topologySpreadConstraints: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* The init container that fetches the model, where there is a URI. */}}
{{- define "lockstep.pullContainer" -}}
- name: pull
  image: {{ include "lockstep.image" (dict "root" .root "variant" .variant) }}
  imagePullPolicy: {{ .root.Values.image.pullPolicy }}
  args:
    - pull
    - {{ .root.Values.model.uri | quote }}
    - --output={{ include "lockstep.modelPath" .root }}
    # Others may share the volume.
    - --wait
    {{- with .root.Values.model.sha256 }}
    - --sha256={{ . }}
    {{- end }}
  env:
    {{- include "lockstep.logEnvironment" .root | nindent 4 }}
    {{- with .pool.env }}{{ toYaml . | nindent 4 }}{{ end }}
    {{- with .root.Values.model.hfToken }}
    {{- if .secretName }}
    - {name: HF_TOKEN, valueFrom: {secretKeyRef: {name: {{ .secretName }}, key: {{ .key }}}}}
    {{- end }}
    {{- end }}
  {{- include "lockstep.modelEnvironment" .root | nindent 2 }}
  securityContext: {{- include "lockstep.containerSecurity" . | nindent 4 }}
  resources:
    requests: {cpu: 500m, memory: 256Mi}
    limits: {cpu: "2", memory: 1Gi}
  volumeMounts:
    - {name: models, mountPath: /models{{ if .root.Values.model.cache.readOnly }}, readOnly: true{{ end }}}
    {{- with .pool.extraVolumeMounts }}{{ toYaml . | nindent 4 }}{{ end }}
{{- end -}}

{{- define "lockstep.modelEnvironment" -}}
{{- with .Values.model.environmentSecrets }}
envFrom: {{- range . }}
  - {secretRef: {name: {{ . }}}}
{{- end }}
{{- end }}
{{- end -}}

{{/*
The authority of the certificate for clients, for whoever checks it here, as JSON; empty if it is one that every system knows.
*/}}
{{- define "lockstep.clientsAuthority" -}}
{{- $clients := .Values.tls.clients -}}
{{- $secret := dict "name" (default (include "lockstep.clientsSecret" .) $clients.ca.secretName) "key" $clients.ca.key -}}
{{- ternary (dict) $secret (eq $clients.ca.from "system") | toJson -}}
{{- end -}}

{{/* A name in that certificate. */}}
{{- define "lockstep.clientsServerName" -}}
{{- $clients := .Values.tls.clients -}}
{{- if $clients.serverName -}}
{{- $clients.serverName -}}
{{- else if and (eq $clients.mode "certManager") (not $clients.clusterNames) -}}
{{- first $clients.dnsNames -}}
{{- else -}}
{{- printf "%s.%s.svc" (include "lockstep.fullname" .) .Release.Namespace -}}
{{- end -}}
{{- end -}}

{{/* What a client of the chart's own says of certificates. */}}
{{- define "lockstep.clientArguments" -}}
{{- if ne .Values.tls.clients.mode "none" }}
- --tls-server-name={{ include "lockstep.clientsServerName" . }}
{{- if ne .Values.tls.clients.ca.from "system" }}
- --tls-ca=/etc/lockstep/clients-ca/ca.crt
{{- end }}
{{- if .Values.tls.clients.clientCa.secretName }}
- --tls-cert=/etc/lockstep/check/tls.crt
- --tls-key=/etc/lockstep/check/tls.key
{{- end }}
{{- end }}
{{- end -}}

{{/* The files of these. The authority alone: a client has no use for the key. */}}
{{- define "lockstep.clientMounts" -}}
{{- if ne .Values.tls.clients.mode "none" }}
{{- if ne .Values.tls.clients.ca.from "system" }}
- {name: clients-ca, mountPath: /etc/lockstep/clients-ca, readOnly: true}
{{- end }}
{{- if .Values.tls.clients.clientCa.secretName }}
- {name: check, mountPath: /etc/lockstep/check, readOnly: true}
{{- end }}
{{- end }}
{{- end -}}
{{- define "lockstep.clientVolumes" -}}
{{- if ne .Values.tls.clients.mode "none" }}
{{- with include "lockstep.clientsAuthority" . | fromJson }}
- {name: clients-ca, secret: {secretName: {{ .name }}, items: [{key: {{ .key }}, path: ca.crt}]}}
{{- end }}
{{- with .Values.tls.clients.clientCa }}
{{- if .secretName }}
- {name: check, secret: {secretName: {{ $.Values.tls.clients.checkSecretName }}}}
{{- end }}
{{- end }}
{{- end }}
{{- end -}}

{{/* A probe of a coordinator: by HTTP, or, where that asks for a certificate, which nodes have not, by the binary itself. */}}
{{- define "lockstep.coordinatorProbe" -}}
{{- if .root.Values.tls.clients.clientCa.secretName -}}
exec:
  command:
    - lockstep
    - health
    {{- if .isLive }}
    - --live
    {{- end }}
    - --server=https://localhost:7070
    {{- include "lockstep.clientArguments" .root | indent 4 }}
{{- else -}}
httpGet: {path: {{ ternary "/healthz" "/readyz" .isLive }}, port: http, scheme: {{ ternary "HTTP" "HTTPS" (eq .root.Values.tls.clients.mode "none") }}}
{{- end -}}
{{- end -}}

{{/* The volume of models; none where each worker's claim is a template's. */}}
{{- define "lockstep.modelVolume" -}}
{{- $cache := .Values.model.cache -}}
{{- if eq $cache.type "emptyDir" -}}
- {name: models, emptyDir: {{ ternary (dict "sizeLimit" $cache.sizeLimit) (dict) (ne $cache.sizeLimit "") | toJson }}}
{{- else if eq $cache.type "hostPath" -}}
- {name: models, hostPath: {path: {{ $cache.hostPath }}, type: Directory}}
{{- else if eq $cache.type "persistentVolumeClaim" -}}
- name: models
  persistentVolumeClaim:
    claimName: {{ default (printf "%s-models" (include "lockstep.fullname" .)) $cache.existingClaim }}
    {{- if or $cache.readOnly (not .Values.model.uri) }}
    readOnly: true
    {{- end }}
{{- end -}}
{{- end -}}

{{- define "lockstep.modelClaimSpec" -}}
{{- $cache := .Values.model.cache -}}
accessModes: {{ toJson $cache.accessModes }}
resources: {requests: {storage: {{ $cache.size }}}}
{{- with $cache.storageClassName }}
storageClassName: {{ . }}
{{- end }}
{{- end -}}
