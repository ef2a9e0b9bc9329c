# The engine for CPUs, with the demo model. Torch's CPU build; the C++ kernels compiled beforehand; no compiler.
#
# docker build -f deploy/images/engine.Dockerfile .    or    buildah bud -f deploy/images/engine.Dockerfile .
ARG BASE_IMAGE=python:3.11-slim-bookworm

# -- third-party packages: this layer changes with constraints.txt and its requirements file alone --
FROM ${BASE_IMAGE} AS thirdparty
ARG TORCH_INDEX=""
WORKDIR /build
RUN python3 -m venv --without-pip /opt/venv && python3 -m venv /opt/builder
COPY constraints.txt ./
# In place of what the builder's own settings of pip may name.
ENV PIP_CONSTRAINT=/build/constraints.txt
RUN /opt/builder/bin/python -m pip install --quiet --no-cache-dir pip hatchling
COPY deploy/images/requirements/engine.txt requirements.txt
# TORCH_INDEX: an index with PyTorch's CPU build. Without it pip takes the build of its configured index, by default the
# CUDA build: gigabytes that a CPU doesn't need.
RUN if [ -n "${TORCH_INDEX}" ]; then /opt/builder/bin/python -m pip --python /opt/venv/bin/python install --quiet \
      --no-cache-dir --index-url "${TORCH_INDEX}" "$(grep '^torch==' constraints.txt)"; fi \
    && /opt/builder/bin/python -m pip --python /opt/venv/bin/python install --quiet --no-cache-dir \
      --requirement requirements.txt \
    && packages="$(echo /opt/venv/lib/python3.*/site-packages)" \
    && rm -rf "$packages"/torch/include "$packages"/torch/test "$packages"/torch/share \
    && find "$packages"/torch -name '*.a' -delete \
    && echo /opt/pagestream > "$packages/pagestream.pth"

# -- the C++ kernels for every instruction set, and the worker's logs: this layer changes with their folders alone --
FROM ${BASE_IMAGE} AS kernels
RUN apt-get update -qq && apt-get install -y -qq --no-install-recommends g++
COPY services/engine/src/pagestream_engine/features/lora/native /src/pagestream_engine/features/lora/native
COPY services/engine/src/pagestream_engine/attention/native /src/pagestream_engine/attention/native
COPY services/engine/src/pagestream_engine/layers/native /src/pagestream_engine/layers/native
COPY services/engine/src/pagestream_engine/sampler/native /src/pagestream_engine/sampler/native
COPY services/worker/src/pagestream_worker/logs /src/pagestream_worker/logs
COPY services/options/src/pagestream_options/errors.py /src/pagestream_options/
COPY services/engine/src/pagestream_engine/cpu.py services/engine/src/pagestream_engine/errors.py \
     services/engine/src/pagestream_engine/native_build.py services/engine/src/pagestream_engine/native_prebuild.py \
     /src/pagestream_engine/
# HEAD_DIMS: head sizes of the models that this image is for, such as "64 128". Without it attention is compiled for all
# sizes of published models, which takes some ten minutes on two cores; a model of another size runs on torch's own.
ARG HEAD_DIMS=""
ENV PAGESTREAM_HEAD_DIMS=${HEAD_DIMS}
RUN PYTHONPATH=/src python3 -m pagestream_engine.native_prebuild --out /prebuilt \
      pagestream_engine.attention.native.levels pagestream_engine.layers.native.levels \
      pagestream_engine.features.lora.native.levels pagestream_engine.sampler.native.levels pagestream_worker.logs.library

# -- our packages --
FROM thirdparty AS ours
COPY proto proto
COPY kernels kernels
COPY services/options services/options
COPY services/grammars services/grammars
COPY services/streams services/streams
COPY services/telemetry services/telemetry
COPY services/engine services/engine
COPY services/worker services/worker
RUN /opt/builder/bin/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir /wheels \
      ./proto ./kernels ./services/options ./services/grammars ./services/streams ./services/telemetry \
      ./services/engine ./services/worker \
    && /opt/builder/bin/python -m pip --python /opt/venv/bin/python install --quiet --no-deps --no-index \
      --target /opt/pagestream /wheels/*.whl
COPY --from=kernels /prebuilt /opt/pagestream

FROM ${BASE_IMAGE}
LABEL org.opencontainers.image.title="pagestream-engine" \
      org.opencontainers.image.description="Pagestream's engine for CPUs, with the demo model" \
      org.opencontainers.image.licenses="Apache-2.0"
RUN echo "pagestream:x:65532:65532:Pagestream:/tmp:/usr/sbin/nologin" >> /etc/passwd \
    && echo "pagestream:x:65532:" >> /etc/group
COPY --from=thirdparty /opt/venv /opt/venv
COPY deploy/demo-model/model /models/demo
COPY --from=ours /opt/pagestream /opt/pagestream
COPY deploy/images/sbom.py /usr/share/pagestream/sbom.py
RUN python3 /usr/share/pagestream/sbom.py pagestream-engine 0.1.0 \
      /opt/venv/lib/python3.*/site-packages /opt/pagestream \
      > /usr/share/pagestream/sbom.cdx.json
ENV PATH=/opt/pagestream/bin:/opt/venv/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
    HOME=/tmp USER=pagestream PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
USER 65532:65532
WORKDIR /tmp
EXPOSE 9400
ENTRYPOINT []
CMD ["pagestream-engine", "/models/demo"]
