"""The HTTP service: one or more runs behind one address. Needs the extra `serve`.

settings.py    address, keys and limits
keys.py        API keys: names, roles, requests per minute
app.py         create_app: runs, routes and middleware put together
server.py      uvicorn with a port that is taken first and requests that are finished last
workers.py     several processes on one port
connections.py limits of a connection: the head of a request, unread answers, unwanted bodies
middleware.py  headers, metrics, unexpected errors, and what is refused before it is read: hosts, keys, sizes, load
logs.py        log lines with a time, as text or JSON
problems.py    errors as application/problem+json; bodies read as JSON
protocol.py    JSON of requests and answers
routes.py      /v1/predict, /v1/embeddings, /v1/labels, /healthz, /readyz, /info, /metrics
annif.py       /v1/projects: Annif's REST API
runs.py        a run that is served: its predictor, its threads, changes of its folder
batching.py    texts of requests that arrive together are computed together
page/          the web page

Models are reached through `dexter.predict` only.
"""
