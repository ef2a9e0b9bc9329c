{{/* The name by which pods are selected: the release's. In a parent chart it has the dependency's name or alias as
well, since the parent's other charts and a second dependency of this one are of the same release. */}}
{{- define "pagestream.instance" -}}
{{- .Chart.IsRoot | ternary .Release.Name (printf "%s-%s" .Release.Name .Chart.Name) | trunc 63 | trimSuffix "-" -}}
{{- end -}}

{{/* The prefix of all names; short enough for the longest suffix and a StatefulSet's revision label. */}}
{{- define "pagestream.fullname" -}}
{{- .Values.fullnameOverride | default (include "pagestream.instance" .) | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{/* The name of this release in its cluster: the controllerClass of its pools, and an attribute of its metrics. */}}
{{- define "pagestream.release" -}}
{{ .Release.Namespace }}.{{ include "pagestream.fullname" . }}
{{- end -}}

{{/* A component's selector: (dict "root" $ "component" "gateway"). */}}
{{- define "pagestream.selector" -}}
app.kubernetes.io/name: pagestream-{{ .component }}
app.kubernetes.io/instance: {{ include "pagestream.instance" .root | quote }}
{{- end -}}

{{/* The labels of a component's objects: (dict "root" $ "component" "gateway" "extra" MAP). Each key once: the user's
replace the chart's. */}}
{{- define "pagestream.labels" -}}
{{- $chart := printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" -}}
{{- $own := dict
  "app.kubernetes.io/component" .component
  "app.kubernetes.io/part-of" "pagestream"
  "app.kubernetes.io/managed-by" .root.Release.Service
  "app.kubernetes.io/version" .root.Chart.AppVersion
  "helm.sh/chart" $chart -}}
{{- $selector := include "pagestream.selector" . | fromYaml -}}
{{- include "pagestream.overlaid" (list $selector $own .root.Values.commonLabels .extra) -}}
{{- end -}}

{{/* The labels of a component's pods: (dict "root" $ "component" "gateway" "extra" podLabels).
No version: an upgrade of the chart alone restarts nothing. */}}
{{- define "pagestream.podLabels" -}}
{{- $own := dict "app.kubernetes.io/component" .component "app.kubernetes.io/part-of" "pagestream" -}}
{{- $selector := include "pagestream.selector" . | fromYaml -}}
{{- include "pagestream.overlaid" (list $selector $own .root.Values.commonLabels .extra) -}}
{{- end -}}

{{/* Environment variables, each name once and at its first place: (list LIST LIST), where the later ones replace the
earlier. A list with a name twice is refused by server-side apply. */}}
{{- define "pagestream.variables" -}}
{{- $names := list -}}
{{- $last := dict -}}
{{- range $layer := . -}}
{{- range $layer -}}
{{- $names = append $names .name -}}
{{- $_ := set $last .name . -}}
{{- end -}}
{{- end -}}
{{- $variables := list -}}
{{- range $names | uniq }}{{ $variables = append $variables (get $last .) }}{{ end -}}
{{- toYaml $variables -}}
{{- end -}}

{{/* The bytes of a quantity, for comparison. */}}
{{- define "pagestream.bytes" -}}
{{- $text := toString . -}}
{{- $unit := regexFind "[A-Za-z]*$" $text -}}
{{- $units := dict "m" 0.001 "k" 1e3 "M" 1e6 "G" 1e9 "T" 1e12 "P" 1e15 "E" 1e18 -}}
{{- $units = merge $units (dict "Ki" 1024 "Mi" 1048576 "Gi" 1073741824 "Ti" 1099511627776) -}}
{{- $units = merge $units (dict "Pi" 1125899906842624 "Ei" 1152921504606846976) -}}
{{- mulf (trimSuffix $unit $text | float64) (get $units $unit | default 1 | float64) | printf "%.0f" -}}
{{- end -}}

{{/* An annotation of what Argo CD applies last and deletes first: pools, which the operator drains, and gateways, which
are ready once a pool is. The two are in one wave, or each would wait for the other. */}}
{{- define "pagestream.lateWave" -}}
argocd.argoproj.io/sync-wave: "1"
{{- end -}}

{{/* An image of Pagestream: (dict "root" $ "image" .Values.gateway.image). */}}
{{- define "pagestream.image" -}}
{{- $name := list .root.Values.image.registry .image.repository | compact | join "/" -}}
{{- if .image.digest -}}
{{ $name }}@{{ .image.digest }}
{{- else -}}
{{ $name }}:{{ coalesce .image.tag .root.Values.image.tag .root.Chart.AppVersion }}
{{- end -}}
{{- end -}}

{{/* An image of another project: its registry, repository, tag or digest. */}}
{{- define "pagestream.otherImage" -}}
{{- $name := list .registry .repository | compact | join "/" -}}
{{- if .digest -}}{{ $name }}@{{ .digest }}{{- else -}}{{ $name }}:{{ .tag }}{{- end -}}
{{- end -}}

{{- define "pagestream.pullSecrets" -}}
{{- with .Values.image.pullSecrets -}}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end -}}
{{- end -}}

{{/* Whether the platform is OpenShift, which gives each namespace its own range of users' ids. Empty: no. */}}
{{- define "pagestream.arbitraryUser" -}}
{{- $given := .Values.security.openshift | toString -}}
{{- if or (eq $given "true") (and (eq $given "auto") (.Capabilities.APIVersions.Has "security.openshift.io/v1")) -}}
true
{{- end -}}
{{- end -}}

{{/* Fields of the second map over those of the first: (list map map). null takes a field away. */}}
{{- define "pagestream.overlaid" -}}
{{- $fields := dict -}}
{{- range $layer := . -}}
{{- range $field, $value := $layer -}}
{{- if kindIs "invalid" $value -}}{{- $_ := unset $fields $field -}}{{- else -}}{{- $_ := set $fields $field $value -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- toYaml $fields -}}
{{- end -}}

{{/* The security context of a component's pods: (dict "root" $ "values" .Values.gateway). */}}
{{- define "pagestream.podSecurityContext" -}}
{{- $common := .root.Values.security.podSecurityContext -}}
{{- if include "pagestream.arbitraryUser" .root -}}
{{- $common = omit $common "runAsUser" "runAsGroup" "fsGroup" -}}
{{- end -}}
{{- include "pagestream.overlaid" (list $common (.values.podSecurityContext | default dict)) -}}
{{- end -}}

{{/* The security context of a component's containers: (dict "root" $ "values" .Values.gateway). */}}
{{- define "pagestream.containerSecurityContext" -}}
{{- include "pagestream.overlaid" (list .root.Values.security.securityContext (.values.securityContext | default dict)) -}}
{{- end -}}

{{/* The probes of a component's container, see `gateway.probes`. */}}
{{- define "pagestream.probes" -}}
{{- range $name := list "startup" "liveness" "readiness" -}}
{{- with index $.probes $name }}
{{ $name }}Probe:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}
{{- end -}}

{{/* Annotations of a component's ServiceAccount: (dict "values" .Values.gateway). */}}
{{- define "pagestream.serviceAccountAnnotations" -}}
{{- with .values.serviceAccount.annotations -}}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end -}}
{{- end -}}

{{/* The placement of pods: (dict "root" $ "component" "gateway" "values" .Values.gateway "spread" true). */}}
{{- define "pagestream.placement" -}}
{{- with .values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- if .spread }}
topologySpreadConstraints:
  {{- if .values.topologySpreadConstraints }}
  {{- toYaml .values.topologySpreadConstraints | nindent 2 }}
  {{- else }}
  {{- range $key := list "kubernetes.io/hostname" "topology.kubernetes.io/zone" }}
  - maxSkew: 1
    topologyKey: {{ $key }}
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels:
        {{- include "pagestream.selector" $ | nindent 8 }}
  {{- end }}
  {{- end }}
{{- end }}
{{- end -}}

{{/* The Secret with Redis' address under `url`. */}}
{{- define "pagestream.redisSecret" -}}
{{- if .Values.redis.bundled.enabled -}}
{{- .Values.redis.bundled.existingSecret | default (printf "%s-redis" (include "pagestream.fullname" .)) -}}
{{- else -}}
{{- .Values.redis.external.existingSecret | default (printf "%s-redis" (include "pagestream.fullname" .)) -}}
{{- end -}}
{{- end -}}

{{/* The key of that Secret with the address as gateways log in. */}}
{{- define "pagestream.redisGatewayKey" -}}
{{- .Values.redis.bundled.enabled | default false | ternary "gateway-url" .Values.redis.external.gatewayKey -}}
{{- end -}}

{{/* Tells one login of the bundled Redis from the next; empty: the first one, without TLS. */}}
{{- define "pagestream.redisLogin" -}}
{{- with .Values.redis.bundled -}}
{{- if and .enabled (or .tls.enabled (gt (int .passwordGeneration) 1)) -}}
{{ int .passwordGeneration }}{{ .tls.enabled | default false | ternary "-tls" "" }}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* What the gateways' address of Redis is made of beside the Secret and its key, which their pods name. */}}
{{- define "pagestream.redisGatewayAddress" -}}
{{- if .Values.redis.bundled.enabled -}}
{{- include "pagestream.redisLogin" . -}}
{{- with .Values.redis.bundled.tls -}}
{{- if .enabled }} {{ empty .existingSecret }} {{ .ca }}{{ end -}}
{{- end -}}
{{- else -}}
{{- .Values.redis.external.url -}}
{{- end -}}
{{- end -}}

{{/* Whether operators take metrics over TLS and by token; empty: no. Processes that export to them directly can't. */}}
{{- define "pagestream.sinkIsSecure" -}}
{{- if and .Values.operator.sink.secure (or .Values.collector.enabled .Values.telemetry.endpoint) -}}true{{- end -}}
{{- end -}}

{{/* The Secret with the certificate and the token of the operators' port for metrics. */}}
{{- define "pagestream.sinkSecret" -}}
{{- .Values.operator.sink.existingSecret | default (printf "%s-operator-sink" (include "pagestream.fullname" .)) -}}
{{- end -}}

{{/* The Secret with the hashes of API keys under `keys`. */}}
{{- define "pagestream.keysSecret" -}}
{{- .Values.apiKeys.existingSecret | default (printf "%s-api-key-hashes" (include "pagestream.fullname" .)) -}}
{{- end -}}

{{/* The Secret with an API key for clients under `key`; empty where there is none. */}}
{{- define "pagestream.callerKeySecret" -}}
{{- if .Values.apiKeys.enabled -}}
{{- if .Values.apiKeys.existingSecret -}}
{{- .Values.smoke.existingSecret -}}
{{- else -}}
{{- include "pagestream.fullname" . }}-api-key
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Not empty where gateways take tokens, or rules for client certificates. */}}
{{- define "pagestream.hasIdentities" -}}
{{- if or .Values.identities.issuers .Values.gateway.tls.clientCertificates.tenants }}true{{ end -}}
{{- end -}}

{{/* The files that say so. */}}
{{- define "pagestream.identities" -}}
{{- with .Values.identities.issuers }}
issuers.json: {{ dict "issuers" . | toJson | quote }}
{{- end }}
{{- with .Values.gateway.tls.clientCertificates.tenants }}
client-tenants: {{ . | quote }}
{{- end }}
{{- end -}}

{{/* The Secret with the gateway's certificate. */}}
{{- define "pagestream.tlsSecret" -}}
{{- .Values.gateway.tls.existingSecret | default (printf "%s-gateway-tls" (include "pagestream.fullname" .)) -}}
{{- end -}}

{{/* The endpoint to which processes export OpenTelemetry. */}}
{{- define "pagestream.otlpEndpoint" -}}
{{- if .Values.telemetry.endpoint -}}
{{- .Values.telemetry.endpoint -}}
{{- else if .Values.collector.enabled -}}
http://{{ include "pagestream.fullname" . }}-collector.{{ .Release.Namespace }}.svc:4317
{{- else -}}
http://{{ include "pagestream.fullname" . }}-operator-sink.{{ .Release.Namespace }}.svc:4317
{{- end -}}
{{- end -}}

{{/* The namespaces that the operator serves, as a YAML list. */}}
{{- define "pagestream.operatorNamespaces" -}}
{{- .Values.operator.namespaces | default (list .Release.Namespace) | toYaml -}}
{{- end -}}

{{/* The environment that all processes of Pagestream share beside the ConfigMap `<release>-settings`. */}}
{{- define "pagestream.podIdentity" -}}
- name: POD_NAME
  valueFrom:
    fieldRef:
      fieldPath: metadata.name
- name: POD_UID
  valueFrom:
    fieldRef:
      fieldPath: metadata.uid
- name: OTEL_RESOURCE_ATTRIBUTES
  value: k8s.namespace.name={{ .Release.Namespace }},k8s.pod.name=$(POD_NAME),k8s.pod.uid=$(POD_UID),pagestream.release={{
    include "pagestream.release" . }}
{{- end -}}

{{/* The model that the notes name as an example. */}}
{{- define "pagestream.exampleModel" -}}
{{- $model := "" -}}
{{- range $name, $spec := .Values.pools -}}
{{- $model = $model | default (dig "model" "servedName" "" $spec) -}}
{{- end -}}
{{- $model | default "MODEL" -}}
{{- end -}}

{{/* What begins all keys in Redis; empty: the default, `ps`. With a Redis of their own releases may share it, so each
     has a prefix by its namespace and name. A release that was installed without one keeps the default. */}}
{{- define "pagestream.keyPrefix" -}}
{{- if .Values.broker.keyPrefix -}}
{{- .Values.broker.keyPrefix -}}
{{- else if not .Values.redis.bundled.enabled -}}
{{- $name := printf "%s-settings" (include "pagestream.fullname" .) -}}
{{- $stored := lookup "v1" "ConfigMap" .Release.Namespace $name -}}
{{- if $stored -}}
{{- dig "data" "PAGESTREAM_BROKER__KEY_PREFIX" "" $stored -}}
{{- else -}}
{{- printf "%s.%s" .Release.Namespace (include "pagestream.instance" .) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* The interval of the scrapes that the chart asks for. */}}
{{- define "pagestream.scrapeInterval" -}}
{{- $own := .Values.operator.prometheus -}}
{{- $usual := ternary (printf "%ds" (int $own.scrapeIntervalSeconds)) "10s" (not (empty $own.url)) -}}
{{- .Values.monitoring.monitors.interval | default $usual -}}
{{- end -}}
