"""HTTP: the OpenAI and Anthropic interfaces, batch jobs, metrics, the web page.

`ridgeline.server.serving.serve` runs it; `ridgeline.server.app.build_app` is the ASGI application.
Nothing is imported here, so that the command line can read `ServerConfig` without the engine.
"""
