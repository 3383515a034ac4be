# docker build -t myxtts .                              CPU
# docker build -t myxtts --build-arg VARIANT=cuda .     CUDA; run it with --gpus all
# docker run -p 8020:8020 -e MYXTTS_API_KEY=… -v myxtts:/data myxtts [--model /models/mine …]
# docker run -p 8020:8020 -v $PWD:/data --entrypoint myxtts myxtts studio --host 0.0.0.0
FROM python:3.12-slim

ARG VARIANT=cpu
WORKDIR /app
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY myxtts ./myxtts
# PyPI's PyTorch brings the CUDA libraries, so that both variants need no other base image.
RUN case "$VARIANT" in \
      cpu) export PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu ;; \
      cuda) ;; \
      *) echo "VARIANT is $VARIANT, expected cpu or cuda" >&2; exit 1 ;; \
    esac \
    && pip install --no-cache-dir --constraint constraints.txt "$(grep '^torch==' constraints.txt)" \
    && pip install --no-cache-dir --constraint constraints.txt '.[serve]' \
    && rm -rf /app \
    && useradd --create-home --uid 1000 myxtts \
    && install -d -o myxtts /data

# Voices that clients add to the base model are kept in /data.
ENV XDG_DATA_HOME=/data PYTHONUNBUFFERED=1
USER myxtts
WORKDIR /data
VOLUME /data
EXPOSE 8020
STOPSIGNAL SIGTERM
HEALTHCHECK --start-period=60s CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8020/health')"]
ENTRYPOINT ["myxtts", "serve", "--host", "0.0.0.0"]
