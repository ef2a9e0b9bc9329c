# Debian's Redis, for clusters that can't pull the official image. Tests only.
ARG BASE_IMAGE=python:3.11-slim-bookworm
FROM ${BASE_IMAGE}
RUN apt-get update -qq && apt-get install -y -qq --no-install-recommends redis-server \
    && rm -rf /var/lib/apt/lists/* && mkdir -p /data && chown 65532:65532 /data
USER 65532:65532
WORKDIR /data
EXPOSE 6379
CMD ["redis-server"]
