"""The way to a collector: one export of encoded spans over HTTP, or over gRPC.

Source: OTLP specification 1.x, "OTLP/HTTP" and "OTLP/gRPC". An export that fails is not tried again: the next one
brings newer spans, and what waits in between has its bound.
"""

from __future__ import annotations

import gzip
import importlib
import ssl
import urllib.request
from typing import Any, Protocol
from urllib.parse import urlsplit

from services.tracing.settings import GRPC, GRPC_MODULE, Certificates, Settings

METHOD = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"


class Undelivered(Exception):
    """The collector did not take an export; the text says why."""


class Collector(Protocol):
    """Used by one thread."""

    def export(self, request: bytes) -> None:
        """Hand over an ExportTraceServiceRequest; blocks up to the timeout. Raises Undelivered."""

    def close(self) -> None: ...


def collector(settings: Settings) -> Collector:
    """The one that the settings name."""
    return GrpcCollector(settings) if settings.protocol == GRPC else HttpCollector(settings)


class HttpCollector:
    """OTLP/HTTP with binary bodies; proxies are those of the environment."""

    def __init__(self, settings: Settings) -> None:
        self._endpoint = settings.endpoint
        self._timeout = settings.timeout
        self._compress = settings.compress
        self._headers = {"Content-Type": "application/x-protobuf", "User-Agent": "OTel-OTLP-Exporter-Penstock"}
        self._headers |= {"Content-Encoding": "gzip"} if settings.compress else {}
        self._headers |= settings.headers
        encrypted = urlsplit(settings.endpoint).scheme == "https"
        self._context = encryption(settings.certificates) if encrypted else None

    def export(self, request: bytes) -> None:
        body = gzip.compress(request, 1) if self._compress else request
        asked = urllib.request.Request(self._endpoint, body, self._headers, method="POST")
        try:
            with urllib.request.urlopen(asked, timeout=self._timeout, context=self._context) as answer:
                answer.read()
        except OSError as error:  # refused, timed out, TLS, and URLError with an HTTP status
            raise Undelivered(str(error)) from error

    def close(self) -> None:
        """Nothing stays open between exports."""


def encryption(certificates: Certificates) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=certificates.trusted or None)
    if certificates.own:
        context.load_cert_chain(certificates.own, certificates.key or None)
    return context


class GrpcCollector:
    """OTLP/gRPC. grpcio is an extra, so it is loaded here alone."""

    def __init__(self, settings: Settings) -> None:
        self._grpc: Any = importlib.import_module(GRPC_MODULE)
        grpc, parts = self._grpc, urlsplit(settings.endpoint)
        target = parts.netloc or settings.endpoint
        if parts.scheme == "https" or (not parts.netloc and not settings.insecure):
            files = [path and open_bytes(path) for path in (
                settings.certificates.trusted, settings.certificates.key, settings.certificates.own)]  # fmt: skip
            self._channel = grpc.secure_channel(target, grpc.ssl_channel_credentials(*(file or None for file in files)))
        else:
            self._channel = grpc.insecure_channel(target)
        self._call = self._channel.unary_unary(METHOD)  # requests are bytes already
        self._timeout = settings.timeout
        self._compression = grpc.Compression.Gzip if settings.compress else grpc.Compression.NoCompression
        self._metadata = tuple((name.lower(), value) for name, value in settings.headers.items())

    def export(self, request: bytes) -> None:
        try:
            self._call(request, timeout=self._timeout, metadata=self._metadata, compression=self._compression)
        except self._grpc.RpcError as error:
            raise Undelivered(f"{error.code().name}: {error.details()}") from error

    def close(self) -> None:
        self._channel.close()


def open_bytes(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()
