# Evener on NVIDIA GPUs: docker build -f docker/cuda.Dockerfile -t evener:cuda . && docker run --rm --gpus all --ipc=host evener:cuda
# The registry's build of torch for Linux names CUDA's libraries as packages, so the driver is all that the host needs.
FROM python:3.11-slim
WORKDIR /evener
RUN pip install --no-cache-dir "torch>=2.11,<3"
COPY . .
RUN pip install --no-cache-dir ".[examples]"
WORKDIR /work
ENTRYPOINT ["evener"]
CMD ["train", "trainer.max_epochs=1", "strategy=ddp", "devices=auto"]
