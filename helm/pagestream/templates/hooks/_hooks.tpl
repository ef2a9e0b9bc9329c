{{/* Annotations of a hook's objects: (dict "events" "pre-upgrade" "weight" "-20"). */}}
{{- define "pagestream.hook" -}}
helm.sh/hook: {{ .events }}
helm.sh/hook-weight: {{ .weight | quote }}
helm.sh/hook-delete-policy: before-hook-creation,hook-succeeded
{{- end -}}

{{/* A Job that runs a command of the operator's image:
(dict "root" $ "component" "crd-hook" "name" NAME "events" EVENTS "limit" SECONDS "args" LIST). */}}
{{- define "pagestream.hookJob" -}}
apiVersion: batch/v1
kind: Job
metadata:
  name: {{ .name }}
  labels:
    {{- include "pagestream.labels" . | nindent 4 }}
  annotations:
    {{- include "pagestream.hook" (dict "events" .events "weight" "-10") | nindent 4 }}
spec:
  backoffLimit: 3
  activeDeadlineSeconds: {{ .limit }}
  template:
    metadata:
      labels:
        {{- /* Beside a proxy that runs on, the Job would never be complete; it calls the API server alone. */}}
        {{- $extra := dict "sidecar.istio.io/inject" "false" }}
        {{- include "pagestream.podLabels" (merge (dict "extra" $extra) .) | nindent 8 }}
      annotations:
        linkerd.io/inject: disabled
    spec:
      restartPolicy: Never
      serviceAccountName: {{ .name }}
      automountServiceAccountToken: true
      enableServiceLinks: false
      terminationGracePeriodSeconds: 5
      {{- with include "pagestream.pullSecrets" .root }}
      {{- . | nindent 6 }}
      {{- end }}
      securityContext:
        {{- include "pagestream.podSecurityContext" (dict "root" .root "values" .root.Values.operator) | nindent 8 }}
      containers:
        - name: hook
          image: {{ include "pagestream.image" (dict "root" .root "image" .root.Values.operator.image) }}
          imagePullPolicy: {{ .root.Values.image.pullPolicy }}
          command: [pagestream-operator]
          args:
            {{- toYaml .args | nindent 12 }}
          env:
            - name: HOME
              value: /tmp
          resources:
            {{- toYaml .root.Values.jobs.resources | nindent 12 }}
          securityContext:
            {{- include "pagestream.containerSecurityContext" (dict
              "root" .root "values" .root.Values.operator) | nindent 12 }}
          volumeMounts:
            - name: tmp
              mountPath: /tmp
      volumes:
        - name: tmp
          emptyDir: {}
      {{- $placed := pick .root.Values.operator "nodeSelector" "tolerations" "priorityClassName" }}
      {{- with include "pagestream.placement" (dict
        "root" .root "component" .component "values" $placed "spread" false) | trim }}
      {{- . | nindent 6 }}
      {{- end }}
{{- end -}}

{{/* The NetworkPolicy of a hook's pod: the API server and DNS alone. */}}
{{- define "pagestream.hookNetworkPolicy" -}}
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata:
  name: {{ .name }}
  labels:
    {{- include "pagestream.labels" . | nindent 4 }}
  annotations:
    {{- include "pagestream.hook" (dict "events" .events "weight" "-20") | nindent 4 }}
spec:
  podSelector:
    matchLabels:
      {{- include "pagestream.selector" . | nindent 6 }}
  policyTypes: [Ingress, Egress]
  egress:
    {{- include "pagestream.egressDNS" .root | nindent 4 }}
    {{- include "pagestream.egressAPIServer" .root | nindent 4 }}
{{- end -}}
