# ckpttool without torch, in less than 150 MB:
#   docker build -t ckpttool .
#   docker run --rm -v "$PWD:/data" --user "$(id -u):$(id -g)" ckpttool inspect last.pt

FROM python:3.13-alpine AS build
RUN apk add --no-cache g++  # ml_dtypes has no wheel for musl, so it is compiled
COPY pyproject.toml README.md LICENSE /src/
COPY release /src/release
COPY ckpttool /src/ckpttool
RUN python -m venv --without-pip /opt/ckpttool \
    && pip --python /opt/ckpttool/bin/python install --no-cache-dir '/src[fast]' \
    && find /opt/ckpttool -type d -name tests -prune -exec rm -r {} +

FROM python:3.13-alpine
RUN apk add --no-cache libstdc++
COPY --from=build /opt/ckpttool /opt/ckpttool
ENV PATH="/opt/ckpttool/bin:$PATH"
WORKDIR /data
USER nobody
ENTRYPOINT ["ckpttool"]
