# Routers, and engines on CPUs: vLLM's CPU build, Tercet and the built-in model.
#     make wheels && docker build -f deploy/docker/cpu.Dockerfile -t tercet-cpu:0.3.0 dist
# A tag may change; to fix the base: --build-arg BASE=python@sha256:DIGEST (docs/howto/docker.md).
ARG BASE=python:3.11-slim-bookworm
FROM ${BASE}
# A compiler for code that PyTorch compiles at run time; tini is process 1 and reaps the engines' orphaned processes.
RUN apt-get update \
 && apt-get install -y --no-install-recommends build-essential libnuma1 tini \
 && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/tercet
RUN python -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH
# The steps of `make setup`; requirements/cpu.txt says why there are two.
COPY requirements/cpu.txt requirements/
RUN pip install --no-cache-dir --no-deps -r requirements/cpu.txt \
 && pip install --no-cache-dir torch==2.13.0
COPY *.whl wheels/
RUN pip install --no-cache-dir --no-deps wheels/*.whl \
 && useradd --uid 1000 --create-home tercet \
 && install -d -o tercet -g tercet /var/cache/tercet
ENV TERCET_CACHE=/var/cache/tercet HF_HOME=/var/cache/tercet/hub
USER 1000:1000
ENTRYPOINT ["tini", "--", "tercet"]
CMD ["--help"]
