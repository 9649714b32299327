# Engines on GPUs: vLLM's own image, and Tercet. docs/howto/gpu.md says what works on GPUs today.
#     make wheels && docker build -f deploy/docker/cuda.Dockerfile -t tercet-cuda:0.3.0 dist
# A tag may change; to fix the base: --build-arg BASE=vllm/vllm-openai@sha256:DIGEST (docs/howto/docker.md).
ARG BASE=vllm/vllm-openai:v0.32.0
FROM ${BASE}
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
WORKDIR /opt/tercet
RUN apt-get update \
 && apt-get install -y --no-install-recommends tini \
 && rm -rf /var/lib/apt/lists/*
COPY *.whl wheels/
# Packages of vLLM's image stay unchanged; only missing ones are added. Sidecars and simulated engines need no more.
RUN python3 -m pip freeze --exclude-editable | grep -E '^[A-Za-z0-9._-]+==' > /tmp/there.txt \
 && python3 -m pip install --no-cache-dir --constraint /tmp/there.txt wheels/tercet-*.whl \
 && python3 -m pip install --no-cache-dir --no-deps wheels/*.whl \
 && rm /tmp/there.txt \
 && install -d -o 1000 -g 1000 /var/cache/tercet
# PyTorch looks up the user's name, and vLLM's image has no user with this number.
ENV TERCET_CACHE=/var/cache/tercet HF_HOME=/var/cache/tercet/hub USER=tercet
USER 1000:1000
ENTRYPOINT ["tini", "--", "tercet"]
CMD ["--help"]
