{{- define "tercet.name" -}}
{{- if contains .Chart.Name .Release.Name }}{{ .Release.Name | trunc 40 | trimSuffix "-" }}{{ else }}{{ printf "%s-%s" (.Release.Name | trunc 30 | trimSuffix "-") .Chart.Name }}{{ end }}
{{- end }}

{{/* Label selector of pods of the release: (list $ "engine"). */}}
{{- define "tercet.selector" -}}
app.kubernetes.io/name: {{ (index . 0).Chart.Name }}
app.kubernetes.io/instance: {{ (index . 0).Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end }}

{{- define "tercet.labels" -}}
{{ include "tercet.selector" . }}
app.kubernetes.io/version: {{ (index . 0).Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ (index . 0).Release.Service }}
helm.sh/chart: {{ printf "%s-%s" (index . 0).Chart.Name (index . 0).Chart.Version }}
{{- end }}

{{/* Peers that may read /metrics of engines and pickers: those of networkPolicy.monitoring, or the Prometheus of a PodMonitor. */}}
{{- define "tercet.monitoring" -}}
{{- if .Values.networkPolicy.monitoring }}
{{- toYaml .Values.networkPolicy.monitoring }}
{{- else if .Values.podMonitor.enabled -}}
# As the operator labels the pods of each Prometheus.
- namespaceSelector: {}
  podSelector:
    matchExpressions:
    - {key: app.kubernetes.io/name, operator: In, values: [prometheus, prometheus-agent]}
{{- end }}
{{- end }}

{{/* All engines of the release, as --endpoint-selector has it. */}}
{{- define "tercet.engineSelector" -}}
app.kubernetes.io/name={{ .Chart.Name }},app.kubernetes.io/instance={{ .Release.Name }},app.kubernetes.io/component=engine
{{- end }}

{{/* Who may prefill, as --prefill-hosts has it. */}}
{{- define "tercet.prefillHosts" -}}
{{- $port := .Values.ports.engine }}{{- $hosts := list }}
{{- range .Values.gateway.prefillNetworks }}{{ $hosts = append $hosts (printf "%s:%d" . (int $port)) }}{{ end }}
{{- join "," $hosts }}
{{- end }}

{{- define "tercet.secretName" -}}
{{ .Values.auth.existingSecret | default (printf "%s-keys" (include "tercet.name" .)) }}
{{- end }}

{{- define "tercet.eppCertName" -}}
{{ .Values.epp.tls.existingSecret | default (printf "%s-epp-tls" (include "tercet.name" .)) }}
{{- end }}

{{- define "tercet.eppHasTls" -}}
{{- if or .Values.epp.tls.existingSecret .Values.epp.tls.selfSigned }}true{{ end }}
{{- end }}

{{- define "tercet.image" -}}
{{- $root := index . 0 }}{{- $image := index . 1 -}}
{{ with $image.digest }}{{ printf "%s@%s" $image.repository . }}{{ else }}{{ printf "%s:%s" $image.repository ($image.tag | default $root.Chart.AppVersion) }}{{ end }}
{{- end }}

{{- define "tercet.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{- define "tercet.fleetSecret" -}}
- name: TERCET_SECRET
  valueFrom: {secretKeyRef: {name: {{ include "tercet.secretName" . }}, key: fleet-secret}}
{{- end }}

{{- define "tercet.apiKey" -}}
valueFrom: {secretKeyRef: {name: {{ include "tercet.secretName" . }}, key: api-key}}
{{- end }}

{{- define "tercet.adminKey" -}}
valueFrom: {secretKeyRef: {name: {{ include "tercet.secretName" . }}, key: admin-key, optional: true}}
{{- end }}

{{/* Environment of processes that load a model. */}}
{{- define "tercet.modelEnvironment" -}}
- {name: TERCET_CACHE, value: /var/cache/tercet}
- {name: HF_HOME, value: /var/cache/tercet/hub}
- {name: HOME, value: /tmp}
# PyTorch looks up the user's name, which a user given as a number may not have.
- {name: USER, value: tercet}
{{- with .Values.hubToken.existingSecret }}
- name: HF_TOKEN
  valueFrom: {secretKeyRef: {name: {{ . }}, key: {{ $.Values.hubToken.key }}}}
{{- end }}
{{- end }}

{{- define "tercet.modelMounts" -}}
- {name: cache, mountPath: /var/cache/tercet}
- {name: tmp, mountPath: /tmp}
- {name: shm, mountPath: /dev/shm}
{{- end }}

{{- define "tercet.modelVolumes" -}}
- name: cache
{{- if .Values.modelCache.existingClaim }}
  persistentVolumeClaim: {claimName: {{ .Values.modelCache.existingClaim }}}
{{- else if .Values.modelCache.volume }}
  {{- toYaml .Values.modelCache.volume | nindent 2 }}
{{- else }}
  emptyDir: {sizeLimit: {{ .Values.modelCache.sizeLimit }}}
{{- end }}
- {name: tmp, emptyDir: {}}
{{- end }}

{{/* Strategy of a Deployment: a new pod serves before an old one ends, so every role stays served if all groups change at once. */}}
{{- define "tercet.strategy" -}}
{{ .strategy | default (dict "type" "RollingUpdate" "rollingUpdate" (dict "maxSurge" 1 "maxUnavailable" 0)) | toYaml }}
{{- end }}

{{/* Nodes on which pods may run: (list $values). */}}
{{- define "tercet.placement" -}}
{{- with .nodeSelector }}
nodeSelector: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with .tolerations }}
tolerations: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with .affinity }}
affinity: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with .topologySpreadConstraints }}
topologySpreadConstraints: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with .priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
{{- end }}

{{/* Settings of every pod. With service links, Kubernetes would set variables that begin with TERCET_. */}}
{{- define "tercet.pod" -}}
enableServiceLinks: false
securityContext: {{ toYaml .Values.podSecurityContext | nindent 2 }}
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
{{- range . }}
- name: {{ . }}
{{- end }}
{{- end }}
{{- end }}

{{/* Environment values that change with mounted files and secrets, so that pods are replaced. */}}
{{- define "tercet.checksum" -}}
tercet/settings: {{ toJson . | sha256sum | trunc 16 | quote }}
{{- end }}
