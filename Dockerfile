# gti_nb with everything it needs, for GPUs with CUDA and for CPUs.
#   docker build -t gti_nb . && docker run --rm -it --gpus all --shm-size 8g -v "$PWD/runs:/gti_nb/runs" -v "$PWD/data:/gti_nb/data" gti_nb \
#     gti run configs/demo.yaml
# CUDA's libraries come with torch's wheels, in the versions of constraints.txt, so a plain Python image will do; the host brings the driver
# (CUDA 13 needs 580 or newer) and NVIDIA's container toolkit. No image was built where this was written: a test checks that its pins agree
# with constraints.txt and pyproject.toml, and that what it copies is there.
FROM python:3.11.13-slim-bookworm AS system
RUN apt-get update \
 && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends chromium git make \
 && rm -rf /var/lib/apt/lists/*
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility

FROM system
WORKDIR /gti_nb
COPY Makefile pyproject.toml constraints.txt requirements-assets.txt README.md LICENSE ./
COPY gti_nb ./gti_nb
RUN PIP_NO_CACHE_DIR=1 make install
COPY . .
ENV PATH=/gti_nb/.venv/bin:$PATH
CMD ["gti", "check-env"]
