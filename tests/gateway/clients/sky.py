"""An MCP server with one tool."""

from mcp.server import MCPServer

server = MCPServer("sky")


@server.tool()
def weather(city: str) -> str:
    """The weather of a city."""
    return "22 degrees"


server.run()
