export OMP_NUM_THREADS=1 PYTHONPATH=/work/wt/win PATH=/work/wt/bin:/work/main/.venv/bin:$PATH MYPY_CACHE_DIR=/work/wt/win/.mypy_cache; cd /work/wt/win
