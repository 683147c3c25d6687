import argparse
import signal
import threading

from tests.fake_vast import FakeVast, offers, run_args


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.fake_vast",
        description="Serve the API of vast.ai on 127.0.0.1. Rented instances run their command here, as you.",
    )
    parser.add_argument("--port", type=int, default=8091)
    parser.add_argument("--offers", type=int, default=12, help="how many machines are for rent")
    parser.add_argument("--scale", type=float, default=1.0, help="of the limits between calls; 0 for none")
    options = parser.parse_args()
    with FakeVast(offers(options.offers), start=run_args, scale=options.scale, port=options.port) as fake:
        print(f"{fake.url}  VAST_API_KEY={fake.key}", flush=True)
        ended = threading.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: ended.set())
        ended.wait()
        print(f"{len(fake.instances)} rented, {len(fake.billing)} still billing, ${fake.cost_usd:.6f} in all")
        print(f"{len(fake.log)} calls, {len(fake.too_fast)} too fast")


if __name__ == "__main__":
    main()
