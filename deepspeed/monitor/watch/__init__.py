"""Looking at a run: the configuration's `watch` block records it, and a page shows it beside the
run before, while training and afterwards (`ds_watch`).

`record` is the file that a run appends to, `run` what is kept of one, however long it is, `page`
the HTML (with `page.css` and `page.js`), `monitor` what rank 0 writes both with, `cli` the command.
`charts` says what curves are drawn from.
"""
