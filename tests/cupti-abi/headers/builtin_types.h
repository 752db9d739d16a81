// Types of the runtime, none of which is compared.
