{{/* The users of the bundled Redis: (dict "root" $ "passwords" MAP), user to the list of its valid passwords.

Gateways and engines may run what their scripts run, on the deployment's own keys alone: no command that administers,
lists or empties the server. Engines reach neither idempotency keys nor what gateways keep of tenants. */}}
{{- define "pagestream.redisUsers" -}}
{{- $prefix := include "pagestream.keyPrefix" .root | default "ps" -}}
{{- $passwords := .passwords -}}
{{- $work := "-@all +@read +@write +@pubsub +@scripting +@connection +@transaction -@admin -@dangerous" -}}
{{- $work = printf "%s -script +script|load +info +time -scan -randomkey -dbsize" $work -}}
{{- $all := printf "resetkeys ~%s:* resetchannels &%s:* %s" $prefix $prefix $work -}}
{{- $engine := printf "~%s:{* ~%s:model* ~%s:engine* ~%s:adapters" $prefix $prefix $prefix $prefix -}}
{{- $rights := dict "gateway" $all
  "engine" (printf "resetkeys %s resetchannels &%s:* %s" $engine $prefix $work)
  "probe" "resetkeys resetchannels -@all +ping +bgrewriteaof"
  "metrics" "resetkeys resetchannels -@all +ping +info +dbsize +config|get +slowlog|len +latency|latest" -}}
{{- if get $passwords "legacy" -}}
user default reset on #{{ get $passwords "legacy" | sha256sum }} {{ $all }}
{{- else -}}
user default reset off
{{- end -}}
{{- range $user := list "gateway" "engine" "probe" "metrics" }}
user {{ $user }} reset on
{{- range get $passwords $user | default list }} #{{ . | sha256sum }}{{ end }} {{ get $rights $user }}
{{- end -}}
{{- end -}}
