"""Two network namespaces as two hosts with a cable between them.

Root is not needed where users may have namespaces. A namespace has no name: it is kept by a process that ends when its
input does, so nothing is left behind however the tests end.
"""

import subprocess

ADDRESSES = ("10.77.0.1", "10.77.0.2")


class Cable:
    """Two namespaces; `with` ends them once all that was started inside has ended."""

    def __enter__(self):
        self._keepers = []
        try:
            # The second is made inside the first one's user namespace, which may then connect them.
            self._keep("unshare", "--user", "--map-root-user", "--net", "cat")
            self._keep(*self.inside(0), "unshare", "--net", "cat")
            self._ip(0, "link", "add", "eth0", "type", "veth", "peer", "name", "eth0", "netns", str(self._pid(1)))
            for host, address in enumerate(ADDRESSES):
                self._ip(host, "address", "add", f"{address}/24", "dev", "eth0")
                self._ip(host, "link", "set", "lo", "up")
                self._ip(host, "link", "set", "eth0", "up")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        for keeper in self._keepers:
            keeper.communicate()

    def _keep(self, *command):
        """Starts a namespace's keeper, and waits until it is in its namespace: only then does `cat` answer."""
        keeper = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        self._keepers.append(keeper)
        keeper.stdin.write(b"\n")
        keeper.stdin.flush()
        if keeper.stdout.read(1) != b"\n":
            raise OSError(keeper.stderr.read().decode())

    def _pid(self, host):
        return self._keepers[host].pid

    def inside(self, host):
        """What runs a command in a host, before the command."""
        return ("nsenter", "--preserve-credentials", "--user", "--net", "--target", str(self._pid(host)))

    def _ip(self, host, *words):
        done = subprocess.run((*self.inside(host), "ip", *words), capture_output=True, text=True)
        if done.returncode:
            raise OSError(f"ip {' '.join(words)}: {done.stderr}")

    def cut(self):
        """Loses all that is sent from now on; connections are not told."""
        self._ip(0, "link", "set", "eth0", "down")

    def mend(self):
        """Carries again what is sent."""
        self._ip(0, "link", "set", "eth0", "up")
