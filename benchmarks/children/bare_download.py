"""Gets files over HTTP, 16 at a time, a request each, and does nothing else: what the link allows.

python bare_download.py FOLDER URL…
"""

import http.client
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit


def get(url):
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.netloc)
    connection.request("GET", parts.path)
    answer, view = connection.getresponse(), memoryview(bytearray(1 << 20))
    if answer.status != 200:
        raise SystemExit(f"{url}: status {answer.status}")
    with open(os.path.join(folder, os.path.basename(parts.path)), "wb", buffering=0) as file:
        while count := answer.readinto(view):
            file.write(view[:count])
    connection.close()


folder, *urls = sys.argv[1:]
os.makedirs(folder)
with ThreadPoolExecutor(16) as threads:
    list(threads.map(get, urls))
