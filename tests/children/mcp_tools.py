"""An MCP server on standard input and output whose tool refuses, and says so inside a normal answer.

Each execution is a line of the file that the argument names.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

mcpserver = importlib.import_module("mcp.server.mcpserver")
refused = importlib.import_module("mcp.server.mcpserver.exceptions").ToolError
server = mcpserver.MCPServer("shop")


@server.tool()  # type: ignore[untyped-decorator]
def refund(order: str) -> str:
    with Path(sys.argv[1]).open("a") as executions:
        executions.write(f"{order}\n")
    raise refused(f"order {order} is too old")


server.run("stdio")
