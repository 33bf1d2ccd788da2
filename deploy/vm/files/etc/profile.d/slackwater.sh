# Root's command `slackwater` finds the appliance of this machine. The first login ends what the consoles show until then.
if [ "$(id -u)" = 0 ]; then
    export SLACKWATER_API=https://localhost:8049 SLACKWATER_CA=/etc/slackwater/ca.pem
    [ ! -r /etc/slackwater/admin-token ] || SLACKWATER_TOKEN=$(cat /etc/slackwater/admin-token)
    export SLACKWATER_TOKEN
    slackwater-vm seen
    [ ! -t 1 ] || slackwater-vm status
fi
