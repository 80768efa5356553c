# A volunteer's peer, or a run's host, in a container of its own user.
#     docker build -t homeswarm .
#     docker run --rm -it -v homeswarm:/data -p 4001:4001 homeswarm join ADDRESS --listen :4001
# With a GPU: docker build --build-arg TORCH=cu128 ..., and docker run --gpus all ... (docs/machines.md)
FROM python:3.11-slim
RUN useradd --create-home --uid 10001 swarm && install -d -o swarm -g swarm /data
WORKDIR /src
COPY pyproject.toml README.md ./
COPY swarm swarm
COPY peer peer
COPY bootstrap bootstrap
COPY verification verification
COPY kernels kernels
# torch's CPU wheels: its default ones bring several GB of CUDA. On a GPU Triton wants a C compiler.
ARG TORCH=cpu
RUN [ "$TORCH" = cpu ] || { apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*; }
RUN pip install --no-cache-dir --extra-index-url "https://download.pytorch.org/whl/$TORCH" . && rm -rf /src
USER swarm
WORKDIR /data
ENV HOMESWARM_DIR=/data NUMBA_CACHE_DIR=/data/numba XDG_RUNTIME_DIR=/tmp PYTHONUNBUFFERED=1
VOLUME /data
EXPOSE 4001
STOPSIGNAL SIGTERM
ENTRYPOINT ["swarm"]
CMD ["--help"]
