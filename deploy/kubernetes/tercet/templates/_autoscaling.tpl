{{/*
What a group of engines is scaled by, as a JSON list: (dict "root" $ "name" NAME "engine" $engine). Each is an average over the
engines of the group. Prefill goes by how long requests wait, decode by how full KV is and how long a token takes.
*/}}
{{- define "tercet.engineSignals" -}}
{{- $scaling := .engine.autoscaling }}{{ $role := .engine.role }}{{ $signals := list }}
{{- $of := printf "namespace=%q,engine_group=%q" .root.Release.Namespace .name }}
{{- $match := dict "engine_group" .name }}
{{- if ne $role "decode" }}
{{- with $scaling.queueSeconds }}
{{- $waited := printf "sum(rate(vllm:request_queue_time_seconds_sum{%s}[2m]))" $of }}
{{- $requests := printf "clamp_min(sum(rate(vllm:request_queue_time_seconds_count{%s}[2m])), 1e-9)" $of }}
{{- $signals = append $signals (dict "metric" "vllm_request_queue_time_seconds" "match" $match "query" (printf "%s / %s" $waited $requests) "target" .) }}
{{- end }}
{{- with $scaling.waiting }}
{{- $signals = append $signals (dict "metric" "tercet_engine_waiting" "match" $match "query" (printf "avg(max(tercet_engine_waiting{%s}) by (engine))" $of) "target" .) }}
{{- end }}
{{- end }}
{{- if ne $role "prefill" }}
{{- with $scaling.kvUsage }}
{{- $signals = append $signals (dict "metric" "tercet_engine_kv_usage_ratio" "match" $match "query" (printf "avg(max(tercet_engine_kv_usage_ratio{%s}) by (engine))" $of) "target" .) }}
{{- end }}
{{- with $scaling.stepSeconds }}
{{- $signals = append $signals (dict "metric" "tercet_engine_step_seconds" "match" $match "query" (printf "avg(max(tercet_engine_step_seconds{%s}) by (engine))" $of) "target" .) }}
{{- end }}
{{- end }}
{{- toJson $signals }}
{{- end }}

{{- define "tercet.routerSignals" -}}
{{- $query := printf "sum(tercet_requests_in_flight{namespace=%q,pod=~%q})" .Release.Namespace (printf "%s-router-.*" (include "tercet.name" .)) }}
{{- list (dict "metric" "tercet_requests_in_flight" "query" $query "target" .Values.router.autoscaling.requestsInFlight) | toJson }}
{{- end }}

{{/*
A HorizontalPodAutoscaler, or KEDA's ScaledObject on the same signals: (dict "root" $ "name" NAME "component" LABEL "target"
(dict "apiVersion" ... "kind" ... "name" ...) "scaling" VALUES "signals" JSON "behavior" DICT). A signal with "match" is an average
already, one without is a sum over pods.
*/}}
{{- define "tercet.autoscaler" -}}
{{- $ := .root }}{{ $with := $.Values.autoscaler }}
{{- $signals := fromJsonArray .signals }}
{{- if not $signals }}{{ fail (printf "%s: autoscaling has no signal for its role; see values.yaml" .name) }}{{ end }}
{{- if gt (int .scaling.minReplicas) (int .scaling.maxReplicas) }}{{ fail (printf "%s: autoscaling.minReplicas, %d, is above autoscaling.maxReplicas, %d" .name (int .scaling.minReplicas) (int .scaling.maxReplicas)) }}{{ end }}
{{- $keda := eq $with.kind "ScaledObject" }}
{{- if and $keda (not $with.prometheus) }}{{ fail "autoscaler.prometheus: is required with KEDA; give the URL of a Prometheus, such as http://prometheus-operated.monitoring:9090" }}{{ end }}
apiVersion: {{ ternary "keda.sh/v1alpha1" "autoscaling/v2" $keda }}
kind: {{ $with.kind }}
metadata:
  name: {{ .name }}
  labels: {{ include "tercet.labels" (list $ .component) | nindent 4 }}
spec:
  scaleTargetRef: {{ toJson .target }}
  {{- if $keda }}
  minReplicaCount: {{ .scaling.minReplicas }}
  maxReplicaCount: {{ .scaling.maxReplicas }}
  advanced:
    horizontalPodAutoscalerConfig:
      behavior: {{ toYaml .behavior | nindent 8 }}
  triggers:
  {{- range $signals }}
  - type: prometheus
    metricType: {{ ternary "Value" "AverageValue" (hasKey . "match") }}
    metadata:
      serverAddress: {{ $with.prometheus | quote }}
      query: {{ .query | quote }}
      threshold: {{ .target | quote }}
      # Without data from Prometheus no engine is stopped.
      ignoreNullValues: "false"
    {{- with $with.authenticationRef }}
    authenticationRef: {{ toYaml . | nindent 6 }}
    {{- end }}
  {{- end }}
  {{- else }}
  minReplicas: {{ .scaling.minReplicas }}
  maxReplicas: {{ .scaling.maxReplicas }}
  metrics:
  {{- range $signals }}
  {{- if hasKey . "match" }}
  - type: External
    external:
      metric: {name: {{ .metric }}, selector: {matchLabels: {{ toJson .match }}}}
      target: {type: Value, value: {{ .target | quote }}}
  {{- else }}
  - type: Pods
    pods:
      metric: {name: {{ .metric }}}
      target: {type: AverageValue, averageValue: {{ .target | quote }}}
  {{- end }}
  {{- end }}
  behavior: {{ toYaml .behavior | nindent 4 }}
  {{- end }}
{{- end }}
