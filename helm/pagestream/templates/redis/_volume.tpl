{{/* Refuses another volume than the StatefulSet of an installed release has: the API server would refuse it in the
middle of the upgrade. */}}
{{- define "pagestream.checkRedisVolume" -}}
{{- $name := printf "%s-redis" (include "pagestream.fullname" .) -}}
{{- $stored := lookup "apps/v1" "StatefulSet" .Release.Namespace $name -}}
{{- $wanted := .Values.redis.bundled.persistence -}}
{{- if and .Values.redis.bundled.enabled $stored -}}
{{- $kubectl := printf "kubectl --namespace %s" .Release.Namespace -}}
{{- $orphan := printf "%s delete statefulset %s --cascade=orphan" $kubectl $name -}}
{{- $anew := printf (print "A volume can't be exchanged in place, and what Redis holds is lost with it: wait until no "
  "request runs, delete it by `%s delete statefulset/%s persistentvolumeclaim/data-%s-0 --ignore-not-found`, and "
  "upgrade again") $kubectl $name $name -}}
{{- $claims := dig "spec" "volumeClaimTemplates" list $stored -}}
{{- if ne (empty $claims) (not $wanted.enabled) -}}
{{- fail (printf (print "redis.bundled.persistence.enabled: %v was given, and Redis runs %s a volume. " $anew)
  $wanted.enabled (empty $claims | ternary "without" "with")) -}}
{{- end -}}
{{- range $claims -}}
{{- $size := dig "spec" "resources" "requests" "storage" "" . -}}
{{- $class := dig "spec" "storageClassName" "" . -}}
{{- $modes := dig "spec" "accessModes" list . -}}
{{- $is := include "pagestream.bytes" $size | float64 -}}
{{- $will := include "pagestream.bytes" $wanted.size | float64 -}}
{{- if gt $is $will -}}
{{- fail (printf "redis.bundled.persistence.size: %v was given, and the volume has %s; a volume can't shrink: set %s"
  $wanted.size $size $size) -}}
{{- end -}}
{{- if lt $is $will -}}
{{- $patch := printf "'{\"spec\":{\"resources\":{\"requests\":{\"storage\":\"%v\"}}}}'" $wanted.size -}}
{{- fail (printf (print "redis.bundled.persistence.size: %v was given, and the volume has %s. Helm can't enlarge the "
  "claim of a StatefulSet. Where its storage class allows expansion, run these two commands, which leave Redis "
  "running, and upgrade again:\n  %s patch persistentvolumeclaim data-%s-0 --type merge --patch %s\n  %s")
  $wanted.size $size $kubectl $name $patch $orphan) -}}
{{- end -}}
{{- if ne $class ($wanted.storageClass | default "") -}}
{{- fail (printf (print "redis.bundled.persistence.storageClass: %q was given, and the volume is of %q. " $anew)
  ($wanted.storageClass | default "") $class) -}}
{{- end -}}
{{- if ne (toJson $modes) (toJson $wanted.accessModes) -}}
{{- fail (printf (print "redis.bundled.persistence.accessModes: %s was given, and the volume has %s. " $anew)
  (toJson $wanted.accessModes) (toJson $modes)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
