"""The web page. The server renders everything; the content security policy allows the service's own files only.

app.py        the routes of all pages, their static files, and /batch
view.py       templates and their filters; problems as pages
predict.py    / : the labels of a text, why, heads side by side, a new label
ranking.py    rankings laid out for reading: bars, moves between heads, explanations
labels.py     /labels : search, frequency bands, one label with what resembles it
label_map.py  /map : the labels as points of a plane
training.py   /training : curves of a run
annotate.py   /annotate : suggestions that a person accepts, rejects and adds to
templates/, static/   HTML; one style sheet, small scripts without a build step
"""
