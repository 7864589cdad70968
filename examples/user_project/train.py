from evener.trainer import main

main(config_dir="conf", config_name="project")
