# The engine for NVIDIA GPUs: torch's CUDA build, Triton, and no model. Of CUDA the node has the driver alone.
#
# docker build -f deploy/images/engine-cuda.Dockerfile .    or    buildah bud -f deploy/images/engine-cuda.Dockerfile .
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
COPY deploy/images/requirements/engine-cuda.txt requirements.txt
# TORCH_INDEX: an index with the wanted CUDA build of PyTorch. Without it pip takes the build of its package index.
RUN if [ -n "${TORCH_INDEX}" ]; then /opt/builder/bin/python -m pip --python /opt/venv/bin/python install --quiet \
      --no-cache-dir --index-url "${TORCH_INDEX}" "$(grep '^torch==' constraints.txt)"; fi \
    && /opt/builder/bin/python -m pip --python /opt/venv/bin/python install --quiet --no-cache-dir \
      --requirement requirements.txt \
    && packages="$(echo /opt/venv/lib/python3.*/site-packages)" \
    && rm -rf "$packages"/torch/include "$packages"/torch/test "$packages"/torch/share \
    && find "$packages"/torch -name '*.a' -delete \
    && echo /opt/pagestream > "$packages/pagestream.pth"

# -- the Triton kernels of published models for every GPU family: this layer changes with their folder alone --
FROM thirdparty AS kernels
COPY kernels/src/pagestream_kernels /src/pagestream_kernels
RUN PYTHONPATH=/src /opt/venv/bin/python -m pagestream_kernels.prebuild --out /prebuilt

# -- the worker's logs in C++: this layer changes with their folder alone --
FROM ${BASE_IMAGE} AS logs
RUN apt-get update -qq && apt-get install -y -qq --no-install-recommends g++
COPY services/worker/src/pagestream_worker/logs /src/pagestream_worker/logs
COPY services/options/src/pagestream_options/errors.py /src/pagestream_options/
COPY services/engine/src/pagestream_engine/cpu.py services/engine/src/pagestream_engine/errors.py \
     services/engine/src/pagestream_engine/native_build.py services/engine/src/pagestream_engine/native_prebuild.py \
     /src/pagestream_engine/
RUN PYTHONPATH=/src python3 -m pagestream_engine.native_prebuild --out /prebuilt pagestream_worker.logs.library

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
COPY --from=kernels /prebuilt /opt/pagestream/pagestream_kernels/prebuilt
COPY --from=logs /prebuilt /opt/pagestream

FROM ${BASE_IMAGE}
LABEL org.opencontainers.image.title="pagestream-engine-cuda" \
      org.opencontainers.image.description="Pagestream's engine for NVIDIA GPUs" \
      org.opencontainers.image.licenses="Apache-2.0"
# Triton compiles the launchers of its kernels, and kernels of other shapes, with a C compiler at their first use, so the
# image keeps one. The kernels' caches go to /tmp.
RUN apt-get update -qq && apt-get install -y -qq --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/* \
    && echo "pagestream:x:65532:65532:Pagestream:/tmp:/usr/sbin/nologin" >> /etc/passwd \
    && echo "pagestream:x:65532:" >> /etc/group
COPY --from=thirdparty /opt/venv /opt/venv
COPY --from=ours /opt/pagestream /opt/pagestream
COPY deploy/images/sbom.py /usr/share/pagestream/sbom.py
RUN python3 /usr/share/pagestream/sbom.py pagestream-engine-cuda 0.1.0 \
      /opt/venv/lib/python3.*/site-packages /opt/pagestream > /usr/share/pagestream/sbom.cdx.json
# What the NVIDIA container runtime reads.
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
ENV PATH=/opt/pagestream/bin:/opt/venv/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
    HOME=/tmp USER=pagestream PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
USER 65532:65532
WORKDIR /tmp
EXPOSE 9400
ENTRYPOINT []
CMD ["pagestream-engine"]
