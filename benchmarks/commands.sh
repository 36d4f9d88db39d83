# The commands of the tables and plots of docs/benchmarks.md: copy the one that
# you want to repeat. All of them together take days. Names of tables follow `#`.
#
# Scripts with `sudo` need Linux and iproute2. In a virtual environment, write
# `sudo "$(which python)"`.

python benchmarks/step_time.py  # step_time
python benchmarks/gpu.py  # gpu, on a machine with a GPU
python benchmarks/sharded_state.py  # sharded_state
python benchmarks/local_work.py  # local_work
TF_CPU_ALLOCATOR_USE_BFC=true python benchmarks/local_work.py \
    --models "20 M in 1" \
    --output benchmarks/results/pooled_memory.json  # pooled_memory
python benchmarks/memory.py  # memory
python benchmarks/collective_memory.py --steps 8000
python benchmarks/growth.py
python benchmarks/fit.py  # fit
python benchmarks/monitors.py  # monitors
python benchmarks/exchange.py  # exchange

# Two checkouts of this project, by turns
python benchmarks/against.py ../before

# Links of limited speed
sudo python benchmarks/shaped_network.py --models "4 M"  # shaped_network
sudo python benchmarks/shaped_network.py --models "20 M" \
    --links "100 Mbit/s" "1 Gbit/s" "10 Gbit/s"
sudo python benchmarks/shaped_network.py --hosts 1 3 8 --models "4 M"
sudo python benchmarks/shaped_network.py --family "1%" --models "4 M" \
    --hosts 2 4 8 --links "10 Mbit/s" "100 Mbit/s" \
    --output benchmarks/results/slow_network.json  # slow_network
sudo python benchmarks/shaped_network.py --family stages --models "4 M" \
    --hosts 2 --links "100 Mbit/s" \
    --output benchmarks/results/stages.json  # stages
sudo python benchmarks/shaped_network.py --family AdamW --hosts 2 \
    --links "100 Mbit/s" "1 Gbit/s" "10 Gbit/s" \
    --output benchmarks/results/loco_network.json  # loco_network
sudo python benchmarks/shaped_network.py --family "many hosts" --hosts 8 \
    --links "100 Mbit/s" "1 Gbit/s" \
    --output benchmarks/results/many_hosts.json  # many_hosts

# Round trips
python benchmarks/latency.py --workers 2 4  # latency
python benchmarks/latency.py --workers 8 --round-trips 0 20 \
    --contenders "stock, dense, custom loop" "dense, fit" "DGC, fit" \
    "DGC, int4, fit"
# Once with each version of Keras:
python benchmarks/latency.py --workers 4 --by-keras --rounds 4 \
    --round-trips 0 20 100 --contenders "dense, fit" "DGC, fit" \
    --output benchmarks/results/keras_latency.json  # keras_latency
python benchmarks/latency.py --workers 2 --by-keras --rounds 5 \
    --round-trips 0 20 --contenders "dense, fit" "DGC, fit" \
    --output benchmarks/results/keras_latency.json
python benchmarks/latency.py --workers 2 --round-trips 0 20 \
    --contenders "dense, fit" "dense, an epoch a step" \
    --output benchmarks/results/epoch_latency.json  # epoch_latency
python benchmarks/latency.py --optimizer AdamW --workers 2 --rounds 2 \
    --round-trips 0 20 \
    --output benchmarks/results/loco_latency.json  # loco_latency
for width in 1414 3162; do
    sudo python benchmarks/latency.py --optimizer AdamW --workers 2 --rounds 2 \
        --round-trips 0 20 --link "100 Mbit/s" --width $width \
        --contenders "stock, AdamW, custom loop" \
        "AdamW in SparseLoCo, custom loop" "AdamW in SparseLoCo, fit" \
        --output benchmarks/results/loco_latency.json
done
python benchmarks/latency.py --optimizer AdamW --workers 2 4 --rounds 5 \
    --round-trips 0 100 --contenders "AdamW in SparseLoCo, fit" \
    "AdamW in SparseLoCo, 8 local steps, fit" \
    --output benchmarks/results/local_latency.json  # local_latency
sudo python benchmarks/overlap.py --rounds 16  # overlap
sudo python benchmarks/overlap.py --local-steps 16 --rounds 10 --turns 8
sudo python benchmarks/overlap.py --width 3162 --rounds 8
python benchmarks/messages.py --workers 16 8  # messages
python benchmarks/cost_model.py  # cost_model

# Accuracy
python benchmarks/accuracy.py  # accuracy
python benchmarks/loco_accuracy.py  # loco_accuracy
python benchmarks/run_bytes.py  # run_bytes
python benchmarks/local_schedule.py  # local_schedule
sudo python benchmarks/time_to_accuracy.py  # time_to_accuracy

# Tables and plots
python benchmarks/tables.py && python benchmarks/plots.py
