"""Every exception that the library raises on purpose, in one tree under `M3Error`.

An error that a model can mend (wrong arguments, a damaged call, a picture that does not decode) is sent to the
model as text and never leaves the session; what is raised here is for the program.
"""

from __future__ import annotations


class M3Error(Exception):
    """The root: `except m3agent.M3Error` catches all that m3agent raises on purpose."""


class ConfigError(M3Error):
    """A model configuration that cannot be run. `field` names the entry, dotted from the top of config.json."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"config field {field!r}: {problem}")
        self.field = field


class CheckpointError(M3Error):
    """A checkpoint that is missing, cut short, or does not fit its config; the message names file or tensor."""


class NumericalError(M3Error):
    """The model computed numbers that are not finite: weights that are broken, or too large for their dtype."""


class MediaError(M3Error):
    """A picture or film that cannot be used; the message names the source and the reason."""


class ImageError(MediaError):
    """A picture that cannot be decoded or is over the limits."""


class VideoError(MediaError):
    """A film that cannot be decoded or is over the limits."""


class ConversationError(M3Error):
    """Messages that the chat format cannot express, such as a tool result without a call before it."""


class ToolDefinitionError(M3Error):
    """A tool that cannot be declared; the message names the tool, its parameter and what to write instead."""


class ToolsetError(M3Error):
    """A toolset that cannot be had: an MCP server that does not start, a plugin that is missing or broken."""


class ToolError(M3Error):
    """Raise it inside a tool to tell the model, in one short text, why the call failed."""


class RenderError(ToolError):
    """A renderer could not turn code into a picture; the message is shown to the model."""


class GuideError(M3Error):
    """Guided decoding cannot go on: a schema without a grammar, or a grammar that ran into its limits."""


class NoOutput(M3Error):
    """A run that was to answer in a type came to no answer; the message says why."""


class ContextOverflow(M3Error):
    """The session's tokens no longer fit into the model's context or into the page pool."""


class CacheError(M3Error):
    """The KV cache on the disk cannot be used; the message names the folder and the reason."""


class SessionFileError(M3Error):
    """A saved session that cannot be read, or written; the message names the file and the reason."""


class RuntimeClosed(M3Error):
    """The runtime, or the session, was closed before or during the call."""


class Overloaded(M3Error):
    """The runtime has as many calls running and waiting as it was opened for. Try again later, or elsewhere."""


class SessionBusy(M3Error):
    """Two runs on one session at the same time. Fork the session, or wait for the first run."""


class MissingDependency(M3Error):
    """An optional package is needed; the message has the pip command that installs it."""

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        super().__init__(f"{purpose} needs {package}: pip install 'm3agent[{extra}]'")
        self.package = package
