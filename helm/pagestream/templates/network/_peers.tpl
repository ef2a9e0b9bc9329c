{{/* Rules that several policies share, each as an item of a list. */}}

{{- define "pagestream.egressDNS" -}}
- to:
    {{- toYaml .Values.networkPolicy.dns | nindent 4 }}
  ports:
    - {port: 53, protocol: UDP}
    - {port: 53, protocol: TCP}
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
          kubernetes.io/metadata.name: {{ .Release.Namespace }}
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
          kubernetes.io/metadata.name: {{ .Release.Namespace }}
      podSelector:
        matchLabels:
          {{- include "pagestream.selector" (dict
            "root" . "component" (.Values.collector.enabled | ternary "collector" "operator")) | nindent 10 }}
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
      kubernetes.io/metadata.name: {{ $namespace }}
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
