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

{{/* All engines and stores of the release, as --endpoint-selector has it. */}}
{{- define "tercet.engineSelector" -}}
app.kubernetes.io/name={{ .Chart.Name }},app.kubernetes.io/instance={{ .Release.Name }},app.kubernetes.io/component
{{- if .Values.store.enabled }} in (engine,store){{ else }}=engine{{ end }}
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

{{/*
The chart's items (YAML) and the user's, each name once: a user's item replaces the chart's of the same name, in its place.
(list NAME-OF-THE-VALUE KEY YAML LIST); KEY is the field that must differ.
*/}}
{{- define "tercet.items" -}}
{{- $value := index . 0 }}{{ $key := index . 1 }}{{ $own := dict }}{{ $found := list }}
{{- range index . 3 }}
{{- $name := get . $key | toString | trimSuffix "/" }}
{{- if not $name }}{{ fail (printf "%s: an item has no %s" $value $key) }}{{ end }}
{{- if hasKey $own $name }}{{ fail (printf "%s: %s is given twice" $value $name) }}{{ end }}
{{- $_ := set $own $name . }}
{{- end }}
{{- $placed := dict }}
{{- range index . 2 | fromYamlArray }}
{{- $name := get . $key | toString }}{{ $_ := set $placed $name true }}
{{- $found = append $found (get $own $name | default .) }}
{{- end }}
{{- range index . 3 }}
{{- if not (hasKey $placed (get . $key | toString | trimSuffix "/")) }}{{ $found = append $found . }}{{ end }}
{{- end }}
{{- toYaml $found }}
{{- end }}

{{/*
The chart's labels or annotations (YAML) with the user's, which replace those of the same name, except the ones by which objects of
the chart select pods: (list NAME-OF-THE-VALUE YAML MAP).
*/}}
{{- define "tercet.named" -}}
{{- $value := index . 0 }}{{ $user := index . 2 | default dict }}
{{- range list "app.kubernetes.io/name" "app.kubernetes.io/instance" "app.kubernetes.io/component" "tercet/group" }}
{{- if hasKey $user . }}{{ fail (printf "%s: %s selects the pods, and cannot be replaced" $value .) }}{{ end }}
{{- end }}
{{- mergeOverwrite (index . 1 | fromYaml) (deepCopy $user) | toYaml }}
{{- end }}

{{/* Refuse containers that have the same name: (list NAME-OF-THE-VALUE LIST NAMES-OF-THE-CHART). */}}
{{- define "tercet.requireNames" -}}
{{- $value := index . 0 }}{{ $seen := index . 2 }}
{{- range index . 1 }}
{{- if has .name $seen }}{{ fail (printf "%s: a container of the pod is called %s already; choose another name" $value .name) }}{{ end }}
{{- $seen = append $seen .name }}
{{- end }}
{{- end }}

{{/* Refuse ports of one pod that are the same; kvFirst to kvLast are a range. */}}
{{- define "tercet.requirePorts" -}}
{{- $ports := .Values.ports }}
{{- if gt (int $ports.kvFirst) (int $ports.kvLast) }}{{ fail (printf "ports.kvFirst: %d is above ports.kvLast, %d" (int $ports.kvFirst) (int $ports.kvLast)) }}{{ end }}
{{- $taken := dict }}
{{- range list "engine" "behindSidecar" "kvEvents" "kvReplay" }}
{{- $port := get $ports . | int }}{{ $name := printf "ports.%s" . }}
{{- if and (ge $port (int $ports.kvFirst)) (le $port (int $ports.kvLast)) }}{{ fail (printf "%s: %d is one of the ports from ports.kvFirst to ports.kvLast" $name $port) }}{{ end }}
{{- if hasKey $taken ($port | toString) }}{{ fail (printf "%s: %d is also %s" $name $port (get $taken ($port | toString))) }}{{ end }}
{{- $_ := set $taken ($port | toString) $name }}
{{- end }}
{{- if and .Values.router.enabled (eq (int .Values.router.port) (int $ports.streams)) }}{{ fail (printf "router.port: %d is also ports.streams" (int .Values.router.port)) }}{{ end }}
{{- end }}
