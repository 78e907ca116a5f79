# One command per chore, the same for people and CI. `make` alone prints this list.
PYTHON ?= python3
VENV   := .venv
RUN    := $(VENV)/bin/python
READY  := $(VENV)/.ready
CONVERGE := $(RUN) -m benchmarks.studies.convergence --save-to benchmarks/results
FULL_PRECISION := --methods "ScatterReduce(residual='fp32')" "ScatterReduce(codec=Quantize(bits=4), residual='fp32')" \
  "ScatterReduce(codec=Sign(), residual='fp32')" "ChunkSparse(residual='fp32')" "PowerSGD(residual='fp32')"
FULL_PRECISION_MOMENTA := --methods "OneBitAdam(lr=0.001, warmup=1000000, residual='fp32')" \
  "OneBitAdam(lr=0.001, warmup=100, residual='fp32')" "QAdam(lr=0.001, warmup=100, residual='fp32')"

.DEFAULT_GOAL := help
.PHONY: help setup peers demo test test-slow test-triton test-gpu check format readme topologies bench-exchanges bench-speed bench-kernels bench-overhead bench-threads bench-convergence bench-shuffle bench-shuffle-time bench-relaxations bench-memory bench-peers bench-bounds bench-hosts bench-scale bench-efficiency bench-quality bench-quality-beside bench-quality-hooks clean

help: ## print the targets
	@awk -F':.*## ' '/^[a-z-]+:.*## / { printf "  make %-20s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "gossamer needs Python 3.11 or later (make PYTHON=python3.12)")'
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --no-compile --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@

setup: $(READY) ## make the virtual environment and install everything into it

peers: $(READY) ## install what gossamer bench can put beside gossamer: Accelerate, DeepSpeed, torchft, hivemind
	$(RUN) -m pip install --disable-pip-version-check --constraint constraints.txt --editable '.[dev,peers]'

demo: $(READY) ## train a GPT on 4 emulated hosts at 200 Mbit/s: DDP, then gossamer (about 3 minutes)
	$(RUN) -m gossamer.bench.demo

test: $(READY) ## run the tests: those in memory on all processors, then those that start processes or measure time
	OMP_NUM_THREADS=1 $(RUN) -m pytest -m 'not slow and not alone' --numprocesses auto --quiet
	$(RUN) -m pytest -m 'not slow and alone'

test-slow: $(READY) ## run the tests that take minutes
	$(RUN) -m pytest -m slow

test-triton: $(READY) ## check the GPU's kernels in Triton's interpreter (installs triton: 290 MB)
	$(RUN) -m pip install --quiet --disable-pip-version-check triton
	$(RUN) -m pytest tests/codecs/test_kernels.py -k triton

test-gpu: ## run the tests that need an NVIDIA GPU, with the torch that $(PYTHON) has (one with CUDA; NCCL's need two)
	PYTHONPATH=src $(PYTHON) -m pytest tests/gpu -rs

check: $(READY) ## lint, formatting and types; warnings are errors
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

format: $(READY) ## format the code and mend what can be mended
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

readme: $(READY) ## run the demo and put its table and picture into the README
	$(RUN) -m gossamer.bench.demo --save-to docs/assets
	$(RUN) -m benchmarks.studies.readme

topologies: $(READY) ## draw the topologies and how they mix, for docs/topologies.md
	$(RUN) -m benchmarks.studies.topologies

bench-exchanges: $(READY) ## measure single exchanges and collectives beside plain TCP on emulated networks (about 15 minutes)
	$(RUN) -m benchmarks.studies.exchanges --save-to benchmarks/results

bench-speed: $(READY) ## measure the step time of exact all-reduce and gossip beside DDP (about an hour)
	$(RUN) -m benchmarks.studies.speed --networks 200mbit --save-to benchmarks/results
	$(RUN) -m benchmarks.studies.speed --networks 1gbit unshaped --rounds 40 --save-to benchmarks/results
	$(RUN) -m benchmarks.studies.speed --networks 100mbit 500mbit 200mbit/slow-host=2x --steps 4 --save-to benchmarks/results
	$(RUN) -m benchmarks.studies.speed --networks 20mbit 200mbit/slow-link=50mbit --steps 2 --save-to benchmarks/results

bench-convergence: $(READY) ## train every relaxation with 1 to 64 workers in one process (hours, resumable)
	$(CONVERGE) --workload examples/02_convnet.py --steps 351
	$(CONVERGE) --workload examples/02_convnet.py --steps 351 --family momenta
	$(CONVERGE) --workload examples/02_convnet.py --steps 351 --workers 16 --cut 2 --family weights
	$(CONVERGE) --workload examples/01_gpt.py --steps 400
	$(CONVERGE) --workload examples/01_gpt.py --steps 400 --family momenta
	$(CONVERGE) --workload examples/01_gpt.py --steps 400 --workers 16 --family weights
	$(CONVERGE) --workload examples/01_gpt.py --steps 400 --workers 16 --optimizer 'GossipAdamW()' \
	  --methods 'Gossip()' 'Gossip(ahead=1.0)' 'Hierarchical(Gossip(), ranks_per_node=4)'
	$(CONVERGE) --workload examples/02_convnet.py --steps 351 --workers 16 --cut 2 --methods 'in_parts(8, Gossip())'
	$(CONVERGE) --workload examples/02_convnet.py --steps 351 --workers 16 --cut 2 --methods 'LocalSGD()' 'DiLoCo(every=8)' 'DiLoCo()'
	$(CONVERGE) --workload examples/02_convnet.py --steps 351 --workers 64 --cut 8 \
	  --methods 'AllReduce()' 'Gossip()' 'GossipGraD()' 'GossipPGA(period=4)' 'QuantizedGossip()'
	$(CONVERGE) --workload examples/02_convnet.py --steps 351 --workers 64 --cut 8 --lr 0.04 \
	  --methods 'AllReduce()' 'Gossip()' 'GossipPGA(period=4)'
	# Residuals in full precision, beside the 16 bits that they are kept in by default.
	$(CONVERGE) --workload examples/02_convnet.py --steps 351 $(FULL_PRECISION)
	$(CONVERGE) --workload examples/02_convnet.py --steps 351 $(FULL_PRECISION_MOMENTA)
	$(CONVERGE) --workload examples/01_gpt.py --steps 400 $(FULL_PRECISION)
	$(CONVERGE) --workload examples/01_gpt.py --steps 400 $(FULL_PRECISION_MOMENTA)
	# What was tried once.
	$(CONVERGE) --workload examples/02_convnet.py --steps 351 --seeds 6 --methods 'AllReduce()' "PowerSGD(residual='fp32')"
	$(CONVERGE) --workload examples/02_convnet.py --steps 351 --seeds 1 --methods "ChunkSparse(density=0.25, residual='fp32')" \
	  "ChunkSparse(momentum_correction=True, residual='fp32')" "ChunkSparse(warmup=35, ramp=35, residual='fp32')" \
	  "ChunkSparse(momentum_correction=True, warmup=35, ramp=35, residual='fp32')" "after(117, ChunkSparse(residual='fp32'))" \
	  "after(117, PowerSGD(residual='fp32'))" "PowerSGD(rank=4, residual='fp32')" "PowerSGD(rank=8, residual='fp32')"
	$(CONVERGE) --workload examples/01_gpt.py --steps 400 --seeds 1 \
	  --methods "after(133, ChunkSparse(residual='fp32'))" "after(133, PowerSGD(residual='fp32'))"
	$(CONVERGE) --workload examples/01_gpt.py --steps 400 --seeds 1 --optimizer 'GossipAdamW()' \
	  --methods 'LocalSGD()' 'DiLoCo(every=8)' 'DiLoCo()' 'Gossip()'
	$(CONVERGE) --workload examples/01_gpt.py --steps 400 --seeds 1 --methods 'Hierarchical(LocalSGD(), ranks_per_node=4)' \
	  'Hierarchical(DiLoCo(), ranks_per_node=4)' 'Hierarchical(DiLoCo(every=8), ranks_per_node=4)'
	$(CONVERGE) --workload examples/02_convnet.py --steps 351 --workers 16 --cut 2 --seeds 2 --methods 'in_parts(16, Gossip())'
	$(CONVERGE) --workload examples/02_convnet.py --steps 351 --workers 64 --cut 8 --seeds 1 --methods 'GossipPGA(every=8)'
	$(CONVERGE) --workload examples/02_convnet.py --steps 351 --workers 64 --cut 8 --lr 0.04 --seeds 1 \
	  --methods 'Hierarchical(Gossip(), ranks_per_node=8)' 'Hierarchical(Gossip(), ranks_per_node=4)' 'QuantizedGossip()'
	$(CONVERGE) --workload examples/01_gpt.py --steps 400 --workers 16 --optimizer 'GossipAdamW()' --seeds 1 --methods 'QuantizedGossip()'
	$(CONVERGE) --workload examples/01_gpt.py --steps 200 --workers 1 --seeds 1 --methods 'AllReduce()'
	$(CONVERGE) --workload examples/01_gpt.py --steps 200 --workers 4 --seeds 1 \
	  --methods 'AllReduce()' 'Gossip()' 'DecentralizedSGD(topology=Complete())'
	$(CONVERGE) --workload examples/01_gpt.py --steps 200 --workers 4 --seeds 1 --optimizer 'GossipAdamW()' --methods 'Gossip()'
	$(CONVERGE) --workload examples/01_gpt.py --steps 200 --workers 16 --seeds 1 --methods 'AllReduce()' 'GossipGraD()'
	$(CONVERGE) --workload examples/01_gpt.py --steps 200 --workers 16 --seeds 1 --lr 0.003 --methods 'AllReduce()' 'Gossip()' 'GossipGraD()'
	$(CONVERGE) --workload examples/01_gpt.py --steps 200 --workers 16 --seeds 1 --lr 0.006 --methods 'Gossip()' 'GossipGraD()'

bench-shuffle: $(READY) ## gossip on shards sorted by label, without and with samples that travel (more than an hour, resumable)
	$(RUN) -m benchmarks.studies.shuffle --save-to benchmarks/results

bench-shuffle-time: $(READY) ## what samples that travel add to the step, 4 emulated hosts at 200 Mbit/s (about 10 minutes)
	$(RUN) -m benchmarks.studies.shuffle_time --save-to benchmarks/results

bench-relaxations: $(READY) ## step time of the relaxations of gradients and weights on 4 hosts at 200 Mbit/s and 1 Gbit/s (about 5 minutes)
	$(VENV)/bin/gossamer bench examples/02_convnet.py --network 200mbit --network 1gbit --hosts 4 --no-memory --rounds 12 \
	  --method 'ScatterReduce()' --method 'ScatterReduce(codec=Quantize(bits=4))' --method 'ChunkSparse(density=0.1)' \
	  --method 'OneBitAdam(warmup=2)' --method "Gossip(wire='bf16')" --method 'QuantizedGossip()' --save-to benchmarks/results/relaxations

bench-memory: $(READY) ## memory of the relaxations beside DDP's, ResNet-50 with emulated compute on 2 hosts (about 10 minutes)
	$(VENV)/bin/gossamer bench 'ResNet50(0.3)' --network 1gbit --hosts 2 --rounds 2 --steps 2 --warmup 3 \
	  --method 'AllReduce()' --method 'ScatterReduce()' --method 'ChunkSparse()' --method 'PowerSGD()' --method 'Gossip()' \
	  --method "ScatterReduce(residual='fp32')" --method "ChunkSparse(residual='fp32')" --method "PowerSGD(residual='fp32')" \
	  --method 'QuantizedGossip()' --method 'in_parts(8, Gossip())' --method 'Gossip(ahead=1.0)' --method 'LocalSGD(every=2)' \
	  --method 'DiLoCo(every=2)' --method 'overlap_forward(AllReduce())' --method 'OneBitAdam(warmup=2)' --method 'QAdam(warmup=2)' \
	  --method 'GossipGraD()' --method 'GossipGraD(history=False)' --method 'GossipPGA(period=2)' --method 'DecentralizedSGD()' --method 'PushSum()' \
	  --method 'LowPrecisionDecentralized()' --save-to benchmarks/results/memory

bench-peers: peers ## step time beside whatever else a user of PyTorch could take, 4 hosts at 200 Mbit/s and 1 Gbit/s (about 40 minutes)
	$(VENV)/bin/gossamer bench examples/02_convnet.py --network 200mbit --network 1gbit --hosts 4 --no-memory --rounds 8 --steps 16 \
	  --per-run 9 --method 'in_parts(8, Gossip())' --method 'in_parts(16, Gossip())' --method 'in_parts(16, GossipGraD())' \
	  --method 'in_parts(16, GossipPGA(period=1))' --method 'OneBitAdam(warmup=2)' --method 'ChunkSparse()' --method ddp-powersgd \
	  --method post-localsgd --method torchft-localsgd --method torchft-diloco --method ddp-fp16 --method accelerate --method deepspeed \
	  --method deepspeed-fp16 --method torchft-ddp --method hivemind --method torchft-streaming-diloco --method horovod --method horovod-fp16 \
	  --method bagua --method bluefog --save-to benchmarks/results/peers

bench-bounds: $(READY) ## step time beside its bound with emulated compute, on every kind of network (about an hour)
	$(VENV)/bin/gossamer bench 'Convnet(0.6)' --network 20mbit --network 100mbit --network 200mbit --network 500mbit --network 1gbit \
	  --network unshaped --network 200mbit/slow-link=50mbit --network 200mbit/slow-host=2x --network 200mbit+2ms --hosts 4 \
	  --method 'AllReduce()' --method 'ScatterReduce()' --method 'ChunkSparse()' --method "Gossip(wire='bf16')" --method 'QuantizedGossip()' \
	  --method 'QuantizedGossip(bits=8)' --method 'overlap_forward(AllReduce())' --no-memory --rounds 4 --steps 4 --warmup 3 --save-to benchmarks/results/bounds
	$(VENV)/bin/gossamer bench 'ResNet50(6)' --network 250mbit --network 500mbit --hosts 4 --method 'AllReduce()' \
	  --method 'overlap_forward(AllReduce())' --method 'ScatterReduce()' --method 'ChunkSparse()' --method "Gossip(wire='bf16')" \
	  --method 'QuantizedGossip(bits=8)' --no-memory --rounds 3 --steps 2 --warmup 3 --save-to benchmarks/results/bounds

bench-hosts: $(READY) ## step time over 2 to 16 emulated hosts, without and with 2 ms per message (about 20 minutes)
	$(VENV)/bin/gossamer bench 'Convnet(0.6)' --network 50mbit --network 50mbit+2ms --hosts 2 --hosts 4 --hosts 8 --hosts 16 \
	  --method 'AllReduce()' --method "Gossip(wire='bf16')" --rounds 5 --steps 3 --warmup 3 --no-memory --save-to benchmarks/results/hosts

SCALE := $(VENV)/bin/gossamer bench 'Convnet(1)' --network 40mbit --rounds 3 --steps 2 --warmup 2 --save-to benchmarks/results/scale \
  --method 'AllReduce()' --method 'ScatterReduce()' --method 'ChunkSparse()' --method "Gossip(wire='bf16')" --method 'QuantizedGossip()' \
  --method 'DecentralizedSGD()' --method 'LowPrecisionDecentralized()' --method 'PushSum()' --method 'GossipPGA(period=4)'

bench-scale: $(READY) ## every pattern but the hierarchical one with 2 to 32 workers: time, bytes, messages, memory, beside what is predicted (about 80 minutes)
	$(SCALE) --hosts 2 --hosts 4 --hosts 8 --per-run 5
	# What a worker needs of memory does not depend on how many there are; 32 processes need all of it for two methods at a time.
	$(SCALE) --hosts 16 --per-run 9 --no-memory
	$(SCALE) --hosts 32 --per-run 2 --no-memory
	$(RUN) -m benchmarks.studies.scale benchmarks/results/scale

bench-efficiency: $(READY) ## papers' runs in slow motion, 8 hosts: GossipGraD and sparse chunks on ResNet-50, sparse chunks and DDP on AlexNet (an hour)
	$(VENV)/bin/gossamer bench 'ResNet50(12)' --network 90mbit --hosts 8 --no-memory --method "GossipGraD(wire='bf16')" \
	  --rounds 3 --steps 2 --warmup 2 --save-to benchmarks/results/efficiency
	$(VENV)/bin/gossamer bench 'ResNet50(12)' --network 60mbit --hosts 8 --no-memory --method 'ChunkSparse()' \
	  --rounds 3 --steps 2 --warmup 4 --save-to benchmarks/results/efficiency
	# DDP beside these two would be 3.2 GB in each of the 8 processes, so it has a run of its own.
	$(VENV)/bin/gossamer lab --hosts 8 --rate 71mbit -- -m gossamer.bench.paired --workload 'AlexNet(16)' \
	  --methods compute 'ChunkSparse()' --rounds 4 --steps 2 --warmup 3 --save-to benchmarks/results/efficiency/alexnet.json
	$(VENV)/bin/gossamer lab --hosts 8 --rate 71mbit -- -m gossamer.bench.paired --workload 'AlexNet(16)' \
	  --methods compute ddp --rounds 2 --steps 1 --warmup 1 --save-to benchmarks/results/efficiency/alexnet-ddp.json

GPT_QUALITY := $(RUN) -m benchmarks.studies.time_to_quality --workload examples/01_gpt.py --target-after 300 --eval-every 25 --seconds 300

bench-quality: $(READY) ## time to a stated quality at 200 Mbit/s, 5 seeds, beside DDP (hours, resumable)
	$(RUN) -m benchmarks.studies.time_to_quality --workload examples/02_convnet.py --target 0.905 --save-to benchmarks/results \
	  --methods ddp compute 'in_parts(8, Gossip())' ddp-powersgd
	$(GPT_QUALITY) --save-to benchmarks/results --methods ddp compute "with_optimizer(in_parts(2, Gossip(wire='fp16')), GossipAdamW())" \
	  'with_optimizer(in_parts(2, Gossip()), GossipAdamW())' ddp-fp16 ddp-powersgd
	$(RUN) -m benchmarks.studies.readme

BESIDE := quality-beside

bench-quality-beside: $(READY) ## the GPT's time to quality with what is sent ahead, computing timed beside each run; BESIDE names the folder
	$(GPT_QUALITY) --save-to benchmarks/results/$(BESIDE) --methods ddp 'with_optimizer(in_parts(2, Gossip()), GossipAdamW())' \
	  'with_optimizer(in_parts(3, Gossip()), GossipAdamW())' 'with_optimizer(in_parts(2, Gossip(ahead=1.0)), GossipAdamW())' \
	  'with_optimizer(in_parts(3, Gossip(ahead=1.0)), GossipAdamW())'

bench-quality-hooks: $(READY) ## the GPT's time to quality beside DDP's fp16 hook, 5 seeds (an hour and a quarter)
	$(GPT_QUALITY) --save-to benchmarks/results/quality-hooks --methods ddp 'with_optimizer(in_parts(2, Gossip(ahead=1.0)), GossipAdamW())' \
	  'with_optimizer(in_parts(3, Gossip(ahead=1.0)), GossipAdamW())' ddp-fp16

bench-kernels: $(READY) ## measure how fast codecs encode and decode beside a memory copy (on a processor ten seconds)
	$(RUN) -m benchmarks.studies.kernels --save-to benchmarks/results

bench-overhead: $(READY) ## what exact all-reduce adds to a step where nothing travels, beside DDP (two minutes)
	$(RUN) -m benchmarks.studies.overhead --save-to benchmarks/results

bench-threads: $(READY) ## whose processor time a step takes: loop, lanes, transport (about 7 minutes)
	$(RUN) -m benchmarks.studies.threads --save-to benchmarks/results

clean: ## remove what was built, and out/ with what was measured and not saved elsewhere
	rm -rf $(VENV) out build dist .mypy_cache .ruff_cache src/*.egg-info
