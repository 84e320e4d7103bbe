{{- define "penstock.name" -}}
{{- default (printf "%s-%s" .Release.Name .Chart.Name | replace "penstock-penstock" "penstock") .Values.nameOverride | trunc 55 | trimSuffix "-" -}}
{{- end }}

{{- define "penstock.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "penstock.labels" -}}
{{ include "penstock.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{- define "penstock.serviceAccount" -}}
{{- .Values.serviceAccount.name | default (ternary (include "penstock.name" .) "default" .Values.serviceAccount.create) -}}
{{- end }}

{{/* GPUs that share each layer. */}}
{{- define "penstock.tensorParallelSize" -}}
{{- $parts := mul .Values.dataParallelSize .Values.pipelineParallelSize | int -}}
{{- $gpus := int .Values.gpus -}}
{{- if and $gpus (mod $gpus $parts) -}}
{{- fail (printf "gpus: %d cannot be divided over dataParallelSize × pipelineParallelSize (%d)" $gpus $parts) -}}
{{- end -}}
{{- div (max $gpus $parts) $parts -}}
{{- end }}

{{/* The command line: a flag or a value per line. */}}
{{- define "penstock.args" -}}
{{- $args := list "serve" -}}
{{- if .Values.model }}{{ $args = append $args .Values.model }}{{ end -}}
{{- if .Values.servedModelNames }}{{ $args = concat (append $args "--served-model-name") .Values.servedModelNames }}{{ end -}}
{{- $args = concat $args (list "--host" "0.0.0.0" "--port" "8000" "--metrics-port" "9464") -}}
{{- $args = concat $args (list "--run-dir" "/run/penstock/server" "--drain-timeout" (toString .Values.drainSeconds)) -}}
{{- if not (int .Values.gpus) }}{{ $args = concat $args (list "--device" "cpu") }}{{ end -}}
{{- $tensor := include "penstock.tensorParallelSize" . -}}
{{- if ne $tensor "1" }}{{ $args = concat $args (list "--tensor-parallel-size" $tensor) }}{{ end -}}
{{- range $option, $size := dict "--data-parallel-size" .Values.dataParallelSize "--pipeline-parallel-size" .Values.pipelineParallelSize -}}
{{- if ne (int $size) 1 }}{{ $args = concat $args (list $option (toString $size)) }}{{ end -}}
{{- end -}}
{{- with .Values.lora }}{{ if .enabled -}}
{{- $args = concat $args (list "--enable-lora" "--max-loras" (toString .maxLoras) "--max-lora-rank" (toString .maxRank)) -}}
{{- range $name, $folder := .modules }}{{ $args = concat $args (list "--lora-modules" (printf "%s=%s" $name $folder)) }}{{ end -}}
{{- if .directory }}{{ $args = concat $args (list "--lora-dir" .directory) }}{{ end -}}
{{- end }}{{ end -}}
{{- if .Values.apiKeys.secretName }}{{ $args = concat $args (list "--api-key-file" "/etc/penstock/keys/api-keys") }}{{ end -}}
{{- if .Values.operatorSocket }}{{ $args = concat $args (list "--admin-address" "unix:/run/penstock/operator.sock") }}{{ end -}}
{{- if or .Values.metrics.vllmNames .Values.inferencePool.enabled }}{{ $args = concat $args (list "--metrics-alias" "vllm") }}{{ end -}}
{{- toYaml (concat $args .Values.args) -}}
{{- end }}

{{/* More pods than one share a claim, so it must be one that several nodes can write. */}}
{{- define "penstock.checkCache" -}}
{{- $pods := ternary .Values.autoscaling.maxReplicas .Values.replicas .Values.autoscaling.enabled | int -}}
{{- if and .Values.cache.size (not .Values.cache.existingClaim) (gt $pods 1) (not (has "ReadWriteMany" .Values.cache.accessModes)) -}}
{{- fail (printf "cache: %d pods cannot share a claim with accessModes %v; take ReadWriteMany, an existingClaim, or size \"\" for a cache that goes with the pod" $pods .Values.cache.accessModes) -}}
{{- end -}}
{{- end }}
