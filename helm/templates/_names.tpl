{{/* Names, labels and the parts of pods that are the same everywhere. Nothing here knows what a process does. */}}

{{- define "lockstep.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) | replace "." "-" | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "lockstep.selector" -}}
app.kubernetes.io/name: {{ default .Chart.Name .Values.nameOverride }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "lockstep.labels" -}}
{{ include "lockstep.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Of pods: nothing that changes with the chart's version, which would start them anew. */}}
{{- define "lockstep.podLabels" -}}
{{ include "lockstep.selector" . }}
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Selector of this release's series, whose label `release` the ServiceMonitors add. */}}
{{- define "lockstep.series" -}}
{namespace="{{ .Release.Namespace }}",release="{{ include "lockstep.fullname" . }}"}
{{- end -}}

{{/* Variant: cpu or cuda. */}}
{{- define "lockstep.image" -}}
{{- $image := .root.Values.image -}}
{{- with get $image.digests .variant -}}
{{- printf "%s@%s" $image.repository . -}}
{{- else -}}
{{- printf "%s:%s-%s" $image.repository (default .root.Chart.AppVersion $image.tag) .variant -}}
{{- end -}}
{{- end -}}

{{- define "lockstep.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "lockstep.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- default "default" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{/* Of pods that read no model: without the annotations by which clouds hand out rights. */}}
{{- define "lockstep.plainAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{- printf "%s-plain" (include "lockstep.fullname" .) -}}
{{- else -}}
{{- include "lockstep.serviceAccountName" . -}}
{{- end -}}
{{- end -}}

{{/* A class has no namespace: its name must be this release's alone. */}}
{{- define "lockstep.priorityClassName" -}}
{{- if .Values.priorityClass.create -}}
{{- default (printf "%s-%s" .Release.Namespace (include "lockstep.fullname" .) | trimPrefix "-") .Values.priorityClass.name -}}
{{- else -}}
{{- .Values.priorityClass.name -}}
{{- end -}}
{{- end -}}

{{/* What every pod spec begins with; workers take their own account in place of the plain one. */}}
{{- define "lockstep.podBase" -}}
serviceAccountName: {{ include "lockstep.plainAccountName" . }}
{{ include "lockstep.podCommon" . }}
{{- end -}}

{{- define "lockstep.podCommon" -}}
# No process here talks to the API server.
automountServiceAccountToken: false
# Variables that Kubernetes makes of services' names would be taken for settings.
enableServiceLinks: false
{{- with .Values.image.pullSecrets }}
imagePullSecrets: {{- range . }}
  - name: {{ . }}
{{- end }}
{{- end }}
{{- with include "lockstep.priorityClassName" . }}
priorityClassName: {{ . }}
{{- end }}
securityContext:
  runAsNonRoot: true
  runAsUser: 65532
  runAsGroup: 65532
  fsGroup: 65532
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{- define "lockstep.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end -}}

{{/* Log and traces, which are no keys of the settings file. */}}
{{- define "lockstep.logEnvironment" -}}
- {name: LOCKSTEP_LOG_FORMAT, value: {{ .Values.telemetry.logFormat | quote }}}
- {name: LOCKSTEP_LOG, value: {{ .Values.telemetry.logFilter | quote }}}
{{- end -}}

{{- define "lockstep.telemetryEnvironment" -}}
{{ include "lockstep.logEnvironment" . }}
{{- with .Values.telemetry.otlpEndpoint }}
- {name: OTEL_EXPORTER_OTLP_ENDPOINT, value: {{ . | quote }}}
- {name: OTEL_TRACES_SAMPLER_ARG, value: {{ $.Values.telemetry.traceRatio | quote }}}
{{- end }}
{{- with .Values.telemetry.otlpHeaders }}
{{- if .secretName }}
- {name: OTEL_EXPORTER_OTLP_HEADERS, valueFrom: {secretKeyRef: {name: {{ .secretName }}, key: {{ .key }}}}}
{{- end }}
{{- end }}
{{- if .Values.telemetry.otlpTls.secretName }}
- {name: OTEL_EXPORTER_OTLP_CERTIFICATE, value: /etc/lockstep/otlp-tls/ca.crt}
{{- if .Values.telemetry.otlpTls.clientCertificate }}
- {name: OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE, value: /etc/lockstep/otlp-tls/tls.crt}
- {name: OTEL_EXPORTER_OTLP_CLIENT_KEY, value: /etc/lockstep/otlp-tls/tls.key}
{{- end }}
{{- end }}
{{- end -}}

{{/* Volumes and mounts of certificates: those of the cluster's members for both, those for clients for coordinators. */}}
{{- define "lockstep.clusterSecret" -}}
{{- default (printf "%s-cluster-tls" (include "lockstep.fullname" .)) .Values.tls.cluster.secretName -}}
{{- end -}}
{{- define "lockstep.clientsSecret" -}}
{{- default (printf "%s-clients-tls" (include "lockstep.fullname" .)) .Values.tls.clients.secretName -}}
{{- end -}}
