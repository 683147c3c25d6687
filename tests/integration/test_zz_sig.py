import signal, time, psutil, pytest, subprocess
from tests.integration.test_join import *
from tests.integration.test_join import make
def test_many(make, wait_until):
    bad=[]
    joining = make(40)
    for i in range(1,41):
        m = joining.start(i)
        wait_until(lambda: "the link is up" in m.said(), LONG_S, "up")
        time.sleep((i % 20)*0.001)
        m.process.terminate()
        try: code=m.ended(9)
        except psutil.TimeoutExpired:
            print("HANG", i, m.said()); 
            print(subprocess.run(["py-spy","dump","--pid",str(m.process.pid)],capture_output=True,text=True).stdout)
            continue
        left=joining.run.redis.exists(joining.run.keys.guest(i), joining.run.keys.guest_lock(i))
        print(i, code, left, "seat" in m.said())
