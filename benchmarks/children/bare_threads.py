"""Gets files by ranges of 8 MiB with urllib3, 16 threads, and drops them: what requests cost by themselves.

python bare_threads.py URL…
"""

import sys
from concurrent.futures import ThreadPoolExecutor

import urllib3

PIECE, THREADS = 8 << 20, 16


def get(url, start=0):
    headers = {"Range": f"bytes={start}-{start + PIECE - 1}"}
    answer = pool.request("GET", url, headers=headers, preload_content=False)
    while answer.read1(1 << 20, decode_content=False):
        pass
    answer.release_conn()
    return int(answer.headers["Content-Range"].rpartition("/")[2])


def rest(job):
    url, size = job
    for start in range(PIECE, size, PIECE):
        get(url, start)


pool, urls = urllib3.PoolManager(maxsize=THREADS), sys.argv[1:]
with ThreadPoolExecutor(THREADS) as threads:
    list(threads.map(rest, zip(urls, threads.map(get, urls), strict=True)))
