# The collector that lies beside this file, for clusters that can't pull the public image. Tests only.
FROM scratch
COPY otelcol /otelcol
USER 65532:65532
EXPOSE 4317 4318
ENTRYPOINT ["/otelcol"]
