{{/* The settings of vLLM for Tercet's KV: (dict "root" $ "engine" $engine). */}}
{{- define "tercet.kvTransfer" -}}
{{- $ports := .root.Values.ports -}}
{{- $plugin := merge (dict "host" "$(POD_IP)" "port" (printf "%d-%d" (int $ports.kvFirst) (int $ports.kvLast)) "stop_grace" .engine.stopGraceSeconds) .engine.plugin -}}
{{ dict "kv_connector_extra_config" $plugin | toJson }}
{{- end }}

{{- define "tercet.kvEvents" -}}
{{- $ports := .root.Values.ports -}}
{{ dict "enable_kv_cache_events" true "endpoint" (printf "tcp://*:%d" (int $ports.kvEvents)) "replay_endpoint" (printf "tcp://*:%d" (int $ports.kvReplay)) | toJson }}
{{- end }}

{{/*
The pod of an engine, or with "node" of its ranks on a further machine: (dict "root" $ "group" NAME "engine" $engine "port" N
"split" BOOL "sidecar" BOOL "node" BOOL).
*/}}
{{- define "tercet.enginePod" -}}
{{- $ := .root }}{{ $engine := .engine }}{{ $several := eq $engine.kind "LeaderWorkerSet" -}}
metadata:
  labels:
    {{- $labels := include "tercet.labels" (list $ (ternary "engine-node" "engine" .node)) | fromYaml }}
    {{- $_ := set $labels "tercet/group" .group }}
    {{- if not .node }}
    {{- $_ := set $labels "tercet/role" $engine.role }}{{ $_ := set $labels "llm-d.ai/role" $engine.role }}
    {{- end }}
    {{- include "tercet.named" (list (printf "engines.%s.podLabels" .group) (toYaml $labels) $engine.podLabels) | nindent 4 }}
  {{- $annotations := $engine.podAnnotations }}
  {{- if not .node }}{{ $annotations = merge (dict "tercet/port" ($.Values.ports.engine | toString)) $annotations }}{{ end }}
  {{- with $annotations }}
  annotations: {{ toYaml . | nindent 4 }}
  {{- end }}
spec:
  {{- include "tercet.pod" $ | nindent 2 }}
  serviceAccountName: {{ include "tercet.name" $ }}-engine
  automountServiceAccountToken: false
  terminationGracePeriodSeconds: {{ add $engine.preStopSeconds $engine.stopGraceSeconds 15 }}
  {{- $placed := $engine }}
  {{- if not $engine.affinity }}
  {{- /* Engines of all roles apart, where there are machines enough: what is lost with one machine is one of them. */}}
  {{- $apart := dict "labelSelector" (dict "matchLabels" (include "tercet.selector" (list $ "engine") | fromYaml)) "topologyKey" "kubernetes.io/hostname" }}
  {{- $placed = merge (dict "affinity" (dict "podAntiAffinity" (dict "preferredDuringSchedulingIgnoredDuringExecution" (list (dict "weight" 1 "podAffinityTerm" $apart))))) $engine }}
  {{- end }}
  {{- include "tercet.placement" $placed | nindent 2 }}
  {{- include "tercet.requireNames" (list (printf "engines.%s.initContainers" .group) $engine.initContainers (ternary (list "engine" "sidecar") (list "engine") (and .sidecar (not .node)))) }}
  {{- if or $engine.initContainers (and .sidecar (not .node)) }}
  initContainers:
  {{- with $engine.initContainers }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
  {{- if and .sidecar (not .node) }}
  - name: sidecar
    image: {{ include "tercet.image" (list $ $.Values.image.gateway) }}
    imagePullPolicy: {{ $.Values.image.pullPolicy }}
    # The sidecar starts before the engine and ends after it.
    restartPolicy: Always
    args:
    - sidecar
    - --engine=http://127.0.0.1:{{ .port }}
    - --host=0.0.0.0
    - --port={{ $.Values.ports.engine }}
    - --prefill-hosts={{ include "tercet.prefillHosts" $ }}
    - --log-format=json
    {{- range $engine.sidecar.args }}
    - {{ . | quote }}
    {{- end }}
    env:
    {{- include "tercet.fleetSecret" $ | nindent 4 }}
    - {name: HOME, value: /tmp}
    ports:
    - {name: http, containerPort: {{ $.Values.ports.engine }}}
    # The sidecar passes this path on to the engine.
    readinessProbe:
      httpGet: {path: /health, port: {{ $.Values.ports.engine }}}
      periodSeconds: 5
      timeoutSeconds: 5
    livenessProbe:
      httpGet: {path: /sidecar/metrics, port: {{ $.Values.ports.engine }}}
      periodSeconds: 10
      timeoutSeconds: 10
      failureThreshold: 6
    resources: {{ toYaml $engine.sidecar.resources | nindent 6 }}
    securityContext: {{ include "tercet.containerSecurity" $ | nindent 6 }}
    volumeMounts:
    - {name: tmp, mountPath: /tmp}
  {{- end }}
  {{- end }}
  containers:
  - name: engine
    image: {{ $engine.image | default (include "tercet.image" (list $ $.Values.image.engine)) }}
    imagePullPolicy: {{ $.Values.image.pullPolicy }}
    args:
    - engine
    - --model={{ $.Values.model }}
    {{- with $.Values.servedModelName }}
    - --served-model-name={{ . }}
    {{- end }}
    - --host=0.0.0.0
    - --port={{ .port }}
    - --name=$(POD_NAME)
    {{- if and .split (not .sidecar) (not .node) }}
    - --prefill-hosts={{ include "tercet.prefillHosts" $ }}
    {{- end }}
    {{- with $engine.dtype }}
    - --dtype={{ . }}
    {{- end }}
    {{- if not $engine.gpus }}
    - --kv-cache-gib={{ $engine.kvCacheGib }}
    {{- end }}
    - --
    - --kv-transfer-config={{ include "tercet.kvTransfer" . }}
    - --kv-events-config={{ include "tercet.kvEvents" . }}
    {{- if $several }}
    # Kubernetes replaces this by the variable of the LeaderWorkerSet.
    - --nnodes={{ $engine.nodes }}
    - --node-rank=$(LWS_WORKER_INDEX)
    - --master-addr=$(LWS_LEADER_ADDRESS)
    {{- end }}
    {{- if .node }}
    - --headless
    {{- end }}
    {{- range $engine.vllmArgs }}
    - {{ . | quote }}
    {{- end }}
    env: {{ include "tercet.items" (list (printf "engines.%s.env" .group) "name" (include "tercet.engineEnvironment" (dict "root" $ "several" $several)) $engine.env) | nindent 4 }}
    {{- if .node }}
    lifecycle:
      # A sidecar is deleted together with its engine, which needs it until the engine has ended.
      preStop:
        exec: {command: [sleep, {{ add $engine.preStopSeconds $engine.stopGraceSeconds | quote }}]}
    {{- else }}
    ports:
    - {name: {{ ternary "engine" "http" .sidecar }}, containerPort: {{ .port }}}
    - {name: kv-events, containerPort: {{ $.Values.ports.kvEvents }}}
    - {name: kv-replay, containerPort: {{ $.Values.ports.kvReplay }}}
    startupProbe:
      httpGet: {path: /health, port: {{ .port }}}
      periodSeconds: 5
      timeoutSeconds: 5
      failureThreshold: {{ div $engine.startupSeconds 5 }}
    readinessProbe:
      httpGet: {path: /health, port: {{ .port }}}
      periodSeconds: 5
      timeoutSeconds: 5
      failureThreshold: 3
    livenessProbe:
      httpGet: {path: /health, port: {{ .port }}}
      periodSeconds: 10
      timeoutSeconds: 10
      failureThreshold: 6
    lifecycle:
      # From its deletion on the engine gets no new requests, and its sequences move away; SIGTERM comes after this.
      preStop:
        exec: {command: [sleep, {{ $engine.preStopSeconds | quote }}]}
    {{- end }}
    {{- $resources := deepCopy $engine.resources }}
    {{- if $engine.gpus }}
    {{- $_ := set $resources "limits" (merge (dict $engine.gpuResource $engine.gpus) ($resources.limits | default dict)) }}
    {{- end }}
    resources: {{ toYaml $resources | nindent 6 }}
    securityContext: {{ mergeOverwrite (include "tercet.containerSecurity" $ | fromYaml) $engine.securityContext | toYaml | nindent 6 }}
    volumeMounts: {{ include "tercet.items" (list (printf "engines.%s.volumeMounts" .group) "mountPath" (include "tercet.modelMounts" $) $engine.volumeMounts) | nindent 4 }}
  {{- $volumes := printf "%s\n- {name: shm, emptyDir: {medium: Memory, sizeLimit: %s}}" (include "tercet.modelVolumes" $) $engine.shmSize }}
  volumes: {{ include "tercet.items" (list (printf "engines.%s.volumes" .group) "name" $volumes $engine.volumes) | nindent 2 }}
{{- end }}

{{/* Environment of an engine, before the user's: (dict "root" $ "several" BOOL). */}}
{{- define "tercet.engineEnvironment" -}}
{{- $ := .root -}}
- name: POD_NAME
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
- name: POD_IP
  valueFrom: {fieldRef: {fieldPath: status.podIP}}
{{- if .several }}
- {name: VLLM_HOST_IP, value: $(POD_IP)}
{{- end }}
{{ include "tercet.fleetSecret" $ }}
{{- if $.Values.auth.engines }}
- name: VLLM_API_KEY
  {{- include "tercet.apiKey" $ | nindent 2 }}
{{- end }}
{{ include "tercet.modelEnvironment" $ }}
{{- end }}
