# Images of dexter (docs/containers.md).
#   serve   predicts, serves and edits the labels of runs with a static encoder; no torch
#   train   everything, with torch
# Every package of `serve` has a fixed version and hash, those of `train` a fixed version.
FROM python:3.11-slim AS wheel
WORKDIR /build
COPY pyproject.toml README.md LICENSE ./
COPY src src
RUN pip wheel --no-cache-dir --no-deps --wheel-dir wheels .

FROM python:3.11-slim AS serve-packages
WORKDIR /build
COPY constraints constraints
RUN python -m venv /opt/dexter \
    && /opt/dexter/bin/pip install --no-cache-dir --require-hashes -r constraints/serve.lock
COPY --from=wheel /build/wheels wheels
RUN /opt/dexter/bin/pip install --no-cache-dir --no-deps wheels/*.whl

FROM python:3.11-slim AS train-packages
# torch for CPUs, or for a version of CUDA, is on an index of its own: --build-arg PIP_EXTRA_INDEX_URL=...
ARG PIP_EXTRA_INDEX_URL
WORKDIR /build
COPY constraints constraints
RUN python -m venv /opt/dexter \
    && sed -n 's/^\([a-z0-9][^ ;]*==[^ ;]*\).*/\1/p' constraints/dev.lock > versions.txt \
    && /opt/dexter/bin/pip install --no-cache-dir -c versions.txt torch transformers
COPY --from=wheel /build/wheels wheels
RUN /opt/dexter/bin/pip install --no-cache-dir -c versions.txt \
    "$(echo wheels/*.whl)[train,minilm,data,ann,pgvector,serve]"

FROM python:3.11-slim AS common
RUN useradd --system --uid 10001 --no-create-home dexter && install --directory --owner dexter --group dexter /runs
ENV PATH=/opt/dexter/bin:$PATH PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 HF_HOME=/runs/.hub
VOLUME /runs
WORKDIR /runs
USER 10001
ENTRYPOINT ["dexter"]

FROM common AS train
COPY --from=train-packages /opt/dexter /opt/dexter
CMD ["--help"]

FROM common AS serve
COPY --from=serve-packages /opt/dexter /opt/dexter
EXPOSE 8000
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s --retries=3 CMD ["python", "-c", "from urllib.request import urlopen; urlopen('http://127.0.0.1:8000/readyz', timeout=4)"]
CMD ["serve", "/runs/current", "--host", "0.0.0.0", "--log-format", "json"]
