"""Servers that no library would write. The first argument says what is wrong with this one."""

import json
import sys
import time

WRONG = sys.argv[1]
OBJECT = {"type": "object", "properties": {}}
TOOLS = [
    {"name": "good", "description": "Works.", "inputSchema": OBJECT},
    {"name": "no_schema"},
    {"name": "list_schema", "inputSchema": []},
    {"name": "wrong_type", "inputSchema": {"type": "object", "properties": {"a": {"type": "strin"}}}},
    {"name": "string_schema", "inputSchema": {"type": "string"}},
    {"name": "two words", "inputSchema": OBJECT},
    {"name": "good", "description": "Another one.", "inputSchema": OBJECT},
    {"inputSchema": OBJECT},
]

OUTSIDE = {"$ref": "http://x.invalid/s"}
REFERRING = [  # schemas with references that lead nowhere, one inside, and one that is a value
    {"name": "named", "inputSchema": {"type": "object", "properties": {"default": OUTSIDE}}},
    {"name": "dynamic", "inputSchema": {"type": "object", "properties": {"a": {"$dynamicRef": "http://x.invalid/s"}}}},
    {"name": "circle", "inputSchema": {"type": "object", "properties": {"a": {"$ref": "#/properties/a"}}}},
    {
        "name": "fine",
        "inputSchema": {
            "type": "object",
            "properties": {
                "a": {"default": OUTSIDE, "$ref": "#/properties/b/anyOf/0"},
                "b": {"anyOf": [{"type": "integer"}]},
            },
        },
    },
]

LISTINGS: list[int] = []


def write(message: object) -> None:
    print(json.dumps(message), flush=True)


def answer(request: dict) -> None:
    method, result = request.get("method"), None
    if method == "initialize":
        version = request["params"]["protocolVersion"]
        info = {"name": "by hand", "version": "1"}
        result = {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": info}
    elif method == "tools/list":
        if WRONG == "tools":
            result = {"tools": TOOLS}
        elif WRONG == "references":
            result = {"tools": REFERRING}
        elif WRONG == "grows":  # by one with every listing, in another order each time
            LISTINGS.append(len(LISTINGS))
            tools = [{"name": f"tool_{number}", "inputSchema": OBJECT} for number in LISTINGS]
            result = {"tools": tools[::-1] if len(LISTINGS) % 2 else tools}
        else:
            result = {"tools": TOOLS[:1]}
    elif method == "tools/call":
        if WRONG == "garbage":
            sys.stdout.buffer.write(b'\xff\xfe\x00 not json\n{"jsonrpc": 7}\n[]\n')
            sys.stdout.buffer.flush()
            result = {"content": [{"type": "text", "text": "after the garbage"}]}
        elif WRONG in ("sound", "references"):
            result = {"content": [{"type": "text", "text": "fine"}]}
        elif WRONG == "shape":
            result = {"content": "not a list"}
        elif WRONG == "silent":
            return
    if result is not None:
        write({"jsonrpc": "2.0", "id": request["id"], "result": result})
    elif "id" in request:
        write({"jsonrpc": "2.0", "id": request["id"], "error": {"code": -32601, "message": "no such method"}})


if WRONG == "mute":
    time.sleep(600)
if WRONG == "exits":
    print("a file is missing: config.toml", file=sys.stderr)
    sys.exit(3)
for line in sys.stdin:
    answer(json.loads(line))
