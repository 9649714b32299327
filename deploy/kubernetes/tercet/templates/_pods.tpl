{{/* Environment, mounts and volumes of the chart's pods, before those of the user; see tercet.items. */}}

{{- define "tercet.routerEnvironment" -}}
{{- include "tercet.fleetSecret" . | nindent 0 }}
- name: VLLM_API_KEY
  {{- include "tercet.apiKey" . | nindent 2 }}
- name: TERCET_ADMIN_KEY
  {{- include "tercet.adminKey" . | nindent 2 }}
{{- include "tercet.modelEnvironment" . | nindent 0 }}
{{- end }}

{{- define "tercet.routerMounts" -}}
{{- $door := .Values.router }}{{ $name := include "tercet.name" . }}
{{- include "tercet.modelMounts" . | nindent 0 }}
{{- if $door.scheduling }}
- {name: settings, mountPath: /etc/tercet, readOnly: true}
{{- end }}
{{- if $door.tls.existingSecret }}
- {name: tls, mountPath: /etc/tercet-tls, readOnly: true}
{{- end }}
{{- end }}

{{- define "tercet.routerVolumes" -}}
{{- $door := .Values.router }}{{ $name := include "tercet.name" . }}
{{- include "tercet.modelVolumes" . | nindent 0 }}
- {name: shm, emptyDir: {medium: Memory}}
{{- if $door.scheduling }}
- {name: settings, configMap: {name: {{ $name }}-router}}
{{- end }}
{{- with $door.tls.existingSecret }}
- {name: tls, secret: {secretName: {{ . }}}}
{{- end }}
{{- end }}

{{- define "tercet.storeEnvironment" -}}
- name: POD_NAME
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
- name: POD_IP
  valueFrom: {fieldRef: {fieldPath: status.podIP}}
{{ include "tercet.eppEnvironment" . }}
{{- end }}

{{- define "tercet.eppEnvironment" -}}
{{- include "tercet.fleetSecret" . | nindent 0 }}
- {name: TERCET_CACHE, value: /tmp/cache}
- {name: HOME, value: /tmp}
{{- end }}

{{- define "tercet.eppMounts" -}}
{{- $epp := .Values.epp }}{{ $name := include "tercet.name" . }}
- {name: tmp, mountPath: /tmp}
{{- if $epp.scheduling }}
- {name: settings, mountPath: /etc/tercet, readOnly: true}
{{- end }}
{{- if include "tercet.eppHasTls" . }}
- {name: tls, mountPath: /etc/tercet-tls, readOnly: true}
{{- end }}
{{- end }}

{{- define "tercet.eppVolumes" -}}
{{- $epp := .Values.epp }}{{ $name := include "tercet.name" . }}
- {name: tmp, emptyDir: {}}
{{- if $epp.scheduling }}
- {name: settings, configMap: {name: {{ $name }}-epp}}
{{- end }}
{{- if include "tercet.eppHasTls" . }}
- {name: tls, secret: {secretName: {{ include "tercet.eppCertName" . }}}}
{{- end }}
{{- end }}
