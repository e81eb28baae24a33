from cutslots.cli import main

if __name__ == "__main__":
    main()
