import m3agent as m3


@m3.tool(description="Render SVG code and look at the picture.")
def render(code: str) -> m3.Image:
    return m3.loops.SvgRenderer().render(code)


scene = '<svg viewBox="0 0 224 224"><circle cx="80" cy="100" r="40" fill="red"/></svg>'
agent = m3.Agent(m3.Runtime.open(), tools=[render])
reply = agent.run_sync("Draw this picture.", render(scene))
print(reply.messages[1].calls[0].arguments["code"], reply.text, reply.usage, sep="\n")
