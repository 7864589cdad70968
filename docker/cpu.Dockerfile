# Evener on the CPU: docker build -f docker/cpu.Dockerfile -t evener:cpu . && docker run --rm evener:cpu
FROM python:3.11-slim
WORKDIR /evener
COPY constraints.txt ./
RUN pip install --no-cache-dir -c constraints.txt torch
COPY . .
RUN pip install --no-cache-dir -c constraints.txt ".[examples]"
WORKDIR /work
ENTRYPOINT ["evener"]
CMD ["train", "trainer.max_epochs=1"]
