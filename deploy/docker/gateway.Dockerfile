# The endpoint picker, and commands that call a router; without torch and vLLM.
#     make wheels && docker build -f deploy/docker/gateway.Dockerfile -t tercet-gateway:0.3.0 dist
# A tag may change; to fix the base: --build-arg BASE=python@sha256:DIGEST (docs/howto/docker.md).
ARG BASE=python:3.11-slim-bookworm
FROM ${BASE}
RUN apt-get update \
 && apt-get install -y --no-install-recommends tini \
 && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/tercet
RUN python -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH
COPY requirements/gateway.txt requirements/
RUN pip install --no-cache-dir --no-deps -r requirements/gateway.txt
COPY tercet-*.whl tercet_gateway-*.whl wheels/
RUN pip install --no-cache-dir --no-deps wheels/*.whl \
 && useradd --uid 1000 --create-home tercet \
 && install -d -o tercet -g tercet /var/cache/tercet
ENV TERCET_CACHE=/var/cache/tercet
USER 1000:1000
ENTRYPOINT ["tini", "--", "tercet"]
CMD ["--help"]
