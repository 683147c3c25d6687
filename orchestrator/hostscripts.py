"""The POSIX sh scripts of orchestrator/hosts.py, one for each thing that is done on a host. All begin with PROLOGUE."""

from shlex import quote

TAKEN, MISSING = 3, 4  # exit codes: no place is free, no such program

PROLOGUE = rf"""
umask 077
PATH=$PATH:$HOME/.local/bin
nodes=${{XDG_STATE_HOME:-$HOME/.local/state}}/pptasks/nodes/$(uname -n)
can_look() {{  # else nothing is known of processes, and the script ends
    grep -qz . /proc/self/environ || {{ echo "cannot look at processes: needs Linux's /proc, grep -z"; exit 1; }}
}}
marked() {{  # processes of node $1
    grep -lszxF "PPTASKS_NODE=$1" /proc/[0-9]*/environ | tr -dc '0-9\n'
}}
lives() {{  # whether the first process of node $1 does; sets pid and start
    pid=- start=-
    read -r pid start 2>/dev/null <"$nodes/$1/node" && grep -qszxF "PPTASKS_NODE=$1" "/proc/$pid/environ"
}}
count() {{  # sets taken: nodes that live
    taken=0
    for folder in "$nodes"/*/; do
        folder=${{folder%/}}
        lives "${{folder##*/}}" && taken=$((taken + 1))
    done
}}
check() {{  # that there is a program $1
    (cd / && command -v "$1" >/dev/null) || {{ echo "$1"; exit {MISSING}; }}
}}
"""

# $1: the order's command. When it ends, all that it has started is ended.
_FIRST_PROCESS = """
trap 'kill -s TERM "$child"' TERM
sh -c "$1" & child=$!
wait "$child"; code=$?
while kill -0 "$child" 2>/dev/null; do wait "$child"; code=$?; done
echo "$code" >exit
kill -s KILL 0
"""

# limit, label, command and a function `environment` are set. The node is known by its mark before it has its file.
CREATE = f"""
can_look
mkdir -p "$nodes" || exit 1
exec 9>"$nodes/.lock"
flock -w 10 9 || exit 1
count
[ "$taken" -lt "$limit" ] || exit {TAKEN}
mkdir "$nodes/$label" && cd "$nodes/$label" && : >log || exit 1
(
    exec 9>&-
    environment
    export PPTASKS_NODE="$label"
    exec setsid sh -c {quote(_FIRST_PROCESS)} pptasks-node "$command"
) </dev/null >log 2>&1 &
pid=$! tries=100
started() {{ grep -qszxF "PPTASKS_NODE=$label" "/proc/$pid/environ" || [ -e exit ]; }}  # in this order
until started || [ "$tries" -eq 0 ] || ! kill -0 "$pid" 2>/dev/null; do
    tries=$((tries - 1))
    sleep 0.05
done
started && echo "$pid $(date +%s)" >node && exit 0
kill -s KILL "$pid" $(marked "$label") 2>/dev/null
tail -n 1 log
cd / && rm -rf "$nodes/$label"
exit 1
"""

LIST = """
[ -d "$nodes" ] || exit 0
can_look
for folder in "$nodes"/*/; do
    folder=${folder%/}
    [ -d "$folder" ] || continue
    state=starting code=
    if lives "${folder##*/}"; then
        state=running
    elif [ -e "$folder/node" ]; then
        state=ended
        read -r code 2>/dev/null <"$folder/exit"
    fi
    echo "node ${folder##*/} $state ${code:--} $start"
done
exit 0
"""

# label is set.
DESTROY = """
can_look
if lives "$label"; then
    kill -s TERM "$pid"
    tries=80
    while lives "$label" && [ "$tries" -gt 0 ]; do
        tries=$((tries - 1))
        sleep 0.1
    done
fi
tries=50
while left=$(marked "$label") && [ -n "$left" ]; do
    [ "$tries" -gt 0 ] || { echo "these processes cannot be killed:" $left; exit 1; }
    tries=$((tries - 1))
    kill -s KILL $left 2>/dev/null
    sleep 0.1
done
rm -rf "$nodes/$label"
[ ! -e "$nodes/$label" ]
"""

LOG = 'log=$nodes/{label}/log; [ ! -e "$log" ] || tail -c {size} "$log" | tail -n {lines}'

SEARCH = r"""
can_look
count
echo "taken $taken"
timeout 15 nvidia-smi --query-gpu=name,memory.total --format=csv,noheader,nounits 2>/dev/null | sed 's/^/gpu /'
sed -n 's/^MemAvailable: *\([0-9]*\) kB/memory \1/p' /proc/meminfo
df -Pk "$HOME" | tail -n 1 | { read -r _ _ _ free _; echo "disk $free"; }
exit 0
"""
