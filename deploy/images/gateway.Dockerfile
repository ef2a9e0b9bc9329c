# The gateway: gRPC and OpenAI HTTP. No torch, no compiler.
#
# docker build -f deploy/images/gateway.Dockerfile .    or    buildah bud -f deploy/images/gateway.Dockerfile .
ARG BASE_IMAGE=python:3.11-slim-bookworm

# -- third-party packages: this layer changes with constraints.txt and its requirements file alone --
FROM ${BASE_IMAGE} AS thirdparty
WORKDIR /build
RUN python3 -m venv --without-pip /opt/venv && python3 -m venv /opt/builder
COPY constraints.txt ./
# In place of what the builder's own settings of pip may name.
ENV PIP_CONSTRAINT=/build/constraints.txt
RUN /opt/builder/bin/python -m pip install --quiet --no-cache-dir pip hatchling
COPY deploy/images/requirements/gateway.txt requirements.txt
RUN /opt/builder/bin/python -m pip --python /opt/venv/bin/python install --quiet --no-cache-dir \
      --requirement requirements.txt \
    && echo /opt/pagestream > "$(echo /opt/venv/lib/python3.*/site-packages)/pagestream.pth"

# -- our packages --
FROM thirdparty AS ours
COPY proto proto
COPY services/options services/options
COPY services/grammars services/grammars
COPY services/streams services/streams
COPY services/batches services/batches
COPY services/telemetry services/telemetry
COPY services/gateway services/gateway
RUN /opt/builder/bin/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir /wheels \
      ./proto ./services/options ./services/grammars ./services/streams ./services/batches ./services/telemetry \
      ./services/gateway \
    && /opt/builder/bin/python -m pip --python /opt/venv/bin/python install --quiet --no-deps --no-index \
      --target /opt/pagestream /wheels/*.whl

FROM ${BASE_IMAGE}
LABEL org.opencontainers.image.title="pagestream-gateway" \
      org.opencontainers.image.description="Pagestream's gateway: gRPC and OpenAI HTTP over the durable token stream" \
      org.opencontainers.image.licenses="Apache-2.0"
RUN echo "pagestream:x:65532:65532:Pagestream:/tmp:/usr/sbin/nologin" >> /etc/passwd \
    && echo "pagestream:x:65532:" >> /etc/group
COPY --from=thirdparty /opt/venv /opt/venv
COPY --from=ours /opt/pagestream /opt/pagestream
COPY deploy/images/sbom.py /usr/share/pagestream/sbom.py
RUN python3 /usr/share/pagestream/sbom.py pagestream-gateway 0.1.0 \
      /opt/venv/lib/python3.*/site-packages /opt/pagestream \
      > /usr/share/pagestream/sbom.cdx.json
ENV PATH=/opt/pagestream/bin:/opt/venv/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
    HOME=/tmp USER=pagestream PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
USER 65532:65532
WORKDIR /tmp
EXPOSE 8000 50051 9401
ENTRYPOINT []
CMD ["pagestream-gateway"]
