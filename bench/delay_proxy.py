"""A far-away server on loopback: a TCP proxy that hands every byte on half a round trip late, in either direction.

python bench/delay_proxy.py LISTEN_PORT TARGET_PORT RTT_MS        prints a line once it listens
"""

import asyncio
import sys


async def late(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, delay_s: float) -> None:
    """Copy until the end; the bytes keep their order and their distance in time."""
    loop = asyncio.get_running_loop()
    arrived: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()

    async def receive() -> None:
        while data := await reader.read(1 << 16):
            arrived.put_nowait((loop.time() + delay_s, data))
        arrived.put_nowait((loop.time() + delay_s, b""))

    receiving = asyncio.create_task(receive())
    try:
        while True:
            due, data = await arrived.get()
            await asyncio.sleep(due - loop.time())
            if not data:
                break
            writer.write(data)
            await writer.drain()
        await receiving
    except OSError:
        receiving.cancel()
    finally:
        writer.close()


async def main(listen: int, target: int, rtt_ms: float) -> None:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", target)
        except OSError:
            writer.close()
            return
        await asyncio.gather(late(reader, far_writer, rtt_ms / 2000), late(far_reader, writer, rtt_ms / 2000))

    server = await asyncio.start_server(handle, "127.0.0.1", listen)
    print(f"127.0.0.1:{listen} is {rtt_ms} ms away from :{target}", flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])))
