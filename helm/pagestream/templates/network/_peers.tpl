{{/* Rules that several policies share, each as an item of a list. */}}

{{/* DNS. A policy holds for the ports of DNS' pods, behind the Service's 53: OpenShift's have 5353. */}}
{{- define "pagestream.egressDNS" -}}
{{- $is_openshift := include "pagestream.arbitraryUser" . | not | not -}}
{{- $place := $is_openshift | ternary
  (dict "namespace" "openshift-dns" "labels" (dict "dns.operator.openshift.io/daemonset-dns" "default"))
  (dict "namespace" "kube-system" "labels" (dict "k8s-app" "kube-dns")) -}}
{{- $namespace := dict "matchLabels" (dict "kubernetes.io/metadata.name" $place.namespace) -}}
{{- $own := dict "namespaceSelector" $namespace "podSelector" (dict "matchLabels" $place.labels) -}}
{{- $ports := $is_openshift | ternary (list 53 5353) (list 53) -}}
- to:
    {{- .Values.networkPolicy.dns | default (list $own) | toYaml | nindent 4 }}
  ports:
    {{- range .Values.networkPolicy.dnsPorts | default $ports }}
    - {port: {{ . }}, protocol: UDP}
    - {port: {{ . }}, protocol: TCP}
    {{- end }}
{{- end -}}

{{/* (dict "cidrs" LIST "ports" LIST): nothing where there are no addresses. */}}
{{- define "pagestream.egressCIDRs" -}}
{{- if .cidrs -}}
- to:
    {{- range .cidrs }}
    - ipBlock:
        cidr: {{ . | quote }}
    {{- end }}
  ports:
    {{- range .ports }}
    - {port: {{ . }}, protocol: TCP}
    {{- end }}
{{- end -}}
{{- end -}}

{{- define "pagestream.egressAPIServer" -}}
{{- include "pagestream.egressCIDRs" .Values.networkPolicy.apiServer -}}
{{- end -}}

{{- define "pagestream.egressRedis" -}}
{{- if .Values.redis.bundled.enabled -}}
- to:
    - namespaceSelector:
        matchLabels:
          kubernetes.io/metadata.name: {{ .Release.Namespace | quote }}
      podSelector:
        matchLabels:
          {{- include "pagestream.selector" (dict "root" . "component" "redis") | nindent 10 }}
  ports:
    - {port: 6379, protocol: TCP}
{{- else -}}
{{- include "pagestream.egressCIDRs" .Values.networkPolicy.externalRedis -}}
{{- end -}}
{{- end -}}

{{/* Egress to the OpenTelemetry endpoint. */}}
{{- define "pagestream.egressTelemetry" -}}
{{- if .Values.telemetry.endpoint -}}
{{- include "pagestream.egressCIDRs" .Values.networkPolicy.externalTelemetry -}}
{{- else -}}
- to:
    - namespaceSelector:
        matchLabels:
          kubernetes.io/metadata.name: {{ .Release.Namespace | quote }}
      podSelector:
        matchLabels:
          {{- $component := .Values.collector.enabled | default false | ternary "collector" "operator" }}
          {{- include "pagestream.selector" (dict "root" . "component" $component) | nindent 10 }}
  ports:
    - {port: 4317, protocol: TCP}
{{- end -}}
{{- end -}}

{{/* Engine pods, in this namespace or in all that the operator serves. */}}
{{- define "pagestream.enginePeers" -}}
{{- if .Values.operator.clusterWide -}}
- namespaceSelector: {}
  podSelector:
    matchLabels:
      app.kubernetes.io/name: pagestream-engine
{{- else -}}
{{- range $namespace := include "pagestream.operatorNamespaces" . | fromYamlArray }}
- namespaceSelector:
    matchLabels:
      kubernetes.io/metadata.name: {{ $namespace | quote }}
  podSelector:
    matchLabels:
      app.kubernetes.io/name: pagestream-engine
{{- end }}
{{- end -}}
{{- end -}}

{{/* Ingress to a port with metrics: (dict "root" $ "port" 9401). */}}
{{- define "pagestream.ingressMonitoring" -}}
{{- with .root.Values.networkPolicy.monitoring -}}
- from:
    {{- toYaml . | nindent 4 }}
  ports:
    - {port: {{ $.port }}, protocol: TCP}
{{- end -}}
{{- end -}}
